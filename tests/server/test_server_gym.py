"""NeMo-Gym's two ways of asking: coordinates for its ledger, and not one token for the agent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.serving import Served, message_of, say, scripted, serving, text_of, user, whole
from tokenplane.schemas.staged_row import StagedRow
from tokenplane.schemas.wire import CommitCoords

COORDS = {
    "schema_version",
    "digest_version",
    "extras_digest_version",
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "disposition",
    "digest",
    "extras_digest",
    "staging_key",
    "chain_hash",
    "cumulative_hash",
}
"""CONTRACT section 5: one field more and Gym poisons the call."""


def root(call: str = "c1") -> dict[str, Any]:
    return {
        "schema_version": 2,
        "rollout_id": "g1",
        "model_call_id": call,
        "parent_call_id": None,
        "prev_len": 0,
        "mode": "text",
        "required_prefix_token_ids": [],
        "staging_chain": [],
        "parent_chain_hash": None,
    }


def child(coords: dict[str, Any], call: str = "c2") -> dict[str, Any]:
    return root(call) | {
        "mode": "token_in",
        "parent_call_id": coords["model_call_id"],
        "prev_len": coords["cum_len"],
        "staging_chain": [coords["staging_key"]],
        "parent_chain_hash": coords["chain_hash"],
    }


async def ask(
    served: Served, messages: list[dict[str, Any]], admission: Any, backend: str, **body: Any
) -> httpx.Response:
    """One request as Gym's model server sends it (CONTRACT section 13)."""
    common = {"stream": False, "logprobs": True, "top_logprobs": 0, "temperature": 1.0}
    if backend == "megatron_worker":
        extra: dict[str, Any] = {"offload_params": {"ng_capture": admission}}
    else:
        extra = {"ng_capture": admission, "return_tokens_as_token_ids": True}
        if isinstance(admission, dict) and admission.get("mode") == "token_in":
            extra["required_prefix_token_ids"] = admission["required_prefix_token_ids"]
    return await served.chat(messages, rollout=None, **common, **extra, **body)


@pytest.mark.parametrize("backend", ["megatron_worker", "vllm_worker"])
async def test_coordinates_are_exactly_gyms_and_a_child_continues(backend: str) -> None:
    async with serving(scripted([say("Hi."), say("Ho.")])) as served:
        messages = [user("a")]
        first = await ask(served, messages, root(), backend)
        coords = first.json()["ng_commit_coords"]
        assert coords.keys() == COORDS
        assert CommitCoords.model_validate(coords).disposition == "staged"
        assert coords["staging_key"].startswith("g1/c1/")
        assert coords["weight_version"] == 7
        assert first.json()["choices"][0]["logprobs"] is None
        assert first.headers["x-tokenplane-capture"] == "staged"
        messages += [message_of(first), user("b")]
        second = await ask(served, messages, child(coords), backend)
        after = second.json()["ng_commit_coords"]
        assert (after["parent_call_id"], after["prev_len"]) == ("c1", coords["cum_len"])
        rows = served.rows("g1")
        prefix = whole(rows[:1]).tolist()
        assert served.script.requests[1].prompt_token_ids[: len(prefix)].tolist() == prefix
        for row, found in zip(rows, (coords, after), strict=True):
            assert row.ledger is None
            assert row.evidence.sampling is not None
            for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash", "delta_len"):
                assert getattr(row.call, name) == found[name]
        assert first.json()["id"] != second.json()["id"]


async def test_an_inline_prefix_is_enough() -> None:
    async with serving(scripted([say("Hi."), say("Ho."), say("Hm.")])) as served:
        first = await ask(served, [user("a")], root(), "vllm_worker")
        coords = first.json()["ng_commit_coords"]
        inline = whole(served.rows("g1")).tolist()
        admission = child(coords) | {"staging_chain": [], "required_prefix_token_ids": inline}
        messages = [user("a"), message_of(first), user("b")]
        second = await ask(served, messages, admission, "vllm_worker")
        assert second.json()["ng_commit_coords"]["disposition"] == "staged"
        assert served.rows("g1")[1].evidence.prefix_source == "inline"
        body = {"ng_capture": admission, "required_prefix_token_ids": [9, *inline[1:]]}
        other = await served.chat(messages, rollout=None, **body)
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "prefix_inline_mismatch"


async def test_one_admission_delivered_twice_gives_two_rows() -> None:
    """Gym sends the same body again when a reply is lost; neither row may touch the other."""
    async with serving(scripted([say("One."), say("Two.")])) as served:
        replies = await asyncio.gather(
            *(ask(served, [user("a")], root(), "megatron_worker") for _ in range(2))
        )
        coords = [reply.json()["ng_commit_coords"] for reply in replies]
        assert coords[0]["model_call_id"] == coords[1]["model_call_id"] == "c1"
        assert coords[0]["staging_key"] != coords[1]["staging_key"]
        rows: dict[str, StagedRow] = {row.staging_key: row for row in served.rows("g1")}
        for found in coords:
            assert rows[found["staging_key"]].call.digest == found["digest"]
        assert len({reply.json()["id"] for reply in replies}) == 2


@pytest.mark.parametrize(
    "admission",
    [
        {},
        "g1",
        None,
        root() | {"extra": 1},
        root() | {"mode": "token_in"},
        root() | {"prev_len": 3},
        root() | {"model_call_id": ""},
        root() | {"rollout_id": 3},
    ],
)
async def test_a_malformed_admission_is_served_without_coordinates(admission: Any) -> None:
    async with serving(scripted([say("Hi.")])) as served:
        reply = await ask(served, [user("a")], admission, "megatron_worker")
        assert text_of(reply) == "Hi."
        assert "ng_commit_coords" not in reply.json()
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        assert served.parts.failures.counts() == {"invalid_admission": 1}
        assert not served.rows("g1")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"staging_chain": ["g1/none/0"]}, "prefix_missing_row"),
        ({"prev_len": 3}, "prefix_length"),
        ({"parent_chain_hash": "0" * 64}, "prefix_chain_hash"),
        ({"rollout_id": "g2"}, None),
    ],
)
async def test_a_prefix_that_cannot_be_prepared_is_refused_before_generation(
    change: dict[str, Any], code: str | None
) -> None:
    async with serving(scripted([say("Hi.")]), prefix_cache_bytes=0) as served:
        first = await ask(served, [user("a")], root(), "megatron_worker")
        admission = child(first.json()["ng_commit_coords"]) | change
        messages = [user("a"), message_of(first), user("b")]
        reply = await ask(served, messages, admission, "megatron_worker")
        assert reply.status_code == 409
        error = reply.json()["error"]
        assert error["code"] == (code or "prefix_wrong_rollout")
        assert "context length" not in reply.text
        assert "max_tokens" not in reply.text
        assert len(served.script.requests) == 1
        failed = await served.failures(admission["rollout_id"])
        assert failed == [error["code"]]


async def test_a_failed_stage_has_failed_coordinates() -> None:
    async with serving(scripted([say("Hi.")]), version=None) as served:
        reply = await ask(served, [user("a")], root(), "megatron_worker")
        coords = reply.json()["ng_commit_coords"]
        assert coords.keys() == COORDS
        assert (coords["disposition"], coords["delta_len"]) == ("capture_failed", 0)
        assert coords["staging_key"] is None
        assert text_of(reply) == "Hi."
        assert served.parts.failures.counts() == {"no_policy_epoch": 1}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"offload_params": {"_tokenplane_call": 1}}, "offload_params"),
        ({"offload_params": {"ng_capture": root()}, "ng_capture": root()}, "ng_capture"),
        ({"offload_params": {"ng_capture": root()}, "stream": True}, "stream"),
        ({"ng_capture": root(), "stream": True}, "stream"),
        ({"required_prefix_token_ids": [1]}, "required_prefix_token_ids"),
        ({"offload_params": []}, "offload_params"),
        ({"ng_capture": root(), "n": 2}, "n"),
    ],
)
async def test_contradictory_requests_are_refused(body: dict[str, Any], param: str) -> None:
    async with serving(scripted([])) as served:
        reply = await served.chat([user("a")], rollout=None, **body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
        assert not served.script.requests


async def test_an_admission_and_a_rollout_in_the_url_exclude_each_other() -> None:
    async with serving(scripted([])) as served:
        reply = await served.chat([user("a")], rollout="r1", ng_capture=root())
        assert reply.status_code == 400
        bare = {"prompt": "a", "ng_capture": root()}
        assert (await served.client.post("/v1/completions", json=bare)).status_code == 400


async def test_other_offload_params_pass_and_plain_requests_are_not_captured() -> None:
    async with serving(scripted([say("Hi."), say("Ho.")])) as served:
        body = {"offload_params": {"ng_capture": root(), "trace": "x"}}
        reply = await served.chat([user("a")], rollout=None, **body)
        assert reply.json()["ng_commit_coords"]["disposition"] == "staged"
        plain = await served.chat([user("a")], rollout=None, logprobs=True, top_logprobs=0)
        assert "ng_commit_coords" not in plain.json()
        assert plain.headers["x-tokenplane-capture"] == "off"
        assert len(served.rows("g1")) == 1
