"""NeMo-Gym's real model server in one process: middleware, ledger, converters, HTTP client.

    gym_model_server.py '{"engine": "http://.../v1", "backend": "megatron_worker",
                          "lineage_store": "module:Class", "lineage_store_kwargs": {...}}'

Run by the Gym environment's interpreter. No Ray process, no head server, no Hydra command line. It
prints one line with its URL once it listens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
# Gym's HTTP client lets Hydra parse the command line when it is first used.
del sys.argv[1:]

import uvicorn  # noqa: E402
from nemo_gym import config_types, server_utils  # type: ignore[import-not-found] # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from responses_api_models.vllm_model.app import (  # type: ignore[import-not-found] # noqa: E402
    VLLMModel,
    VLLMModelConfig,
)


def build_app(port: int) -> Any:
    """The application as ``gym env start`` would make it for one policy model."""
    capture = {
        "enabled": True,
        "all_agents": True,
        "external_staging": True,
        "external_staging_backend": SETTINGS["backend"],
        "rebuild_response": False,
        "lineage_store": SETTINGS["lineage_store"],
        "lineage_store_kwargs": SETTINGS["lineage_store_kwargs"],
    }
    client = server_utils.ServerClient(
        head_server_config=config_types.BaseServerConfig(host="127.0.0.1", port=1),
        global_config_dict=OmegaConf.create({"token_id_capture": capture}),
    )
    config = VLLMModelConfig(
        host="127.0.0.1",
        port=port,
        entrypoint="app.py",
        name="policy_model",
        base_url=SETTINGS["engine"],
        api_key="unused",
        model=SETTINGS["model"],
        return_token_id_information=False,
        uses_reasoning_parser=False,
        uses_interleaved_reasoning=False,
    )
    model = VLLMModel(config=config, server_client=client)
    app = model.setup_webserver()
    model.setup_exception_middleware(app)
    return app


async def serve() -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = build_app(port)
    server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.ensure_future(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
        await asyncio.sleep(0.01)
    print(f"gym: ready http://127.0.0.1:{port}", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(serve())
