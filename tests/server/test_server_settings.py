"""Settings: sampling defaults, configuration files, flags, and binds that are refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenplane.engine_adapter.dynamic import gpu_model
from tokenplane.engine_adapter.server.config import (
    ServerConfig,
    check_bind,
    is_loopback,
    parse_config,
    read_config_file,
)
from tokenplane.engine_adapter.server.openai_sampling import (
    SamplingDefaults,
    parse_defaults,
    parse_sampling,
)
from tokenplane.schemas.errors import ConfigError, RequestRejectedError
from tokenplane.tools import serve


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults(1.0, 1.0, 0)),
        ({"temperature": 0.2, "top_p": 0.9, "top_k": 20}, SamplingDefaults(0.2, 0.9, 20)),
        ({"do_sample": False, "temperature": 0.2}, SamplingDefaults(0.0, 1.0, 0)),
        ({"do_sample": True, "temperature": 0.2}, SamplingDefaults(0.2, 1.0, 0)),
        ({"temperature": None, "top_k": None}, SamplingDefaults(1.0, 1.0, 0)),
    ],
)
def test_defaults_come_from_the_generation_config(
    config: dict[str, Any], expected: SamplingDefaults
) -> None:
    assert parse_defaults(config) == expected


def test_settings_win_over_the_generation_config_and_requests_over_both() -> None:
    file = {"temperature": 0.2, "top_k": 20, "do_sample": False}
    defaults = parse_defaults(file, temperature=0.7, top_k=-1, max_answer_tokens=9)
    assert (defaults.temperature, defaults.top_k, defaults.max_answer_tokens) == (0.7, 0, 9)
    silent = parse_sampling({}, defaults)
    assert (silent.temperature, silent.top_k, silent.max_tokens) == (0.7, 0, 9)
    explicit = parse_sampling({"temperature": 0, "top_k": 3, "max_tokens": 5}, defaults)
    assert (explicit.temperature, explicit.top_k, explicit.max_tokens) == (0.0, 3, 5)
    assert parse_sampling({"max_tokens": 5, "max_completion_tokens": 6}, defaults).max_tokens == 6


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}])
def test_a_generation_config_with_wrong_types_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="generation config"):
        parse_defaults(config)


def test_a_default_out_of_range_is_refused() -> None:
    with pytest.raises(RequestRejectedError, match="top_p"):
        parse_defaults({"top_p": 0})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_other_hosts_need_a_token(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    check_bind(host, "token")
    if loopback:
        check_bind(host, None)
    else:
        for token in (None, ""):
            with pytest.raises(ConfigError, match="token"):
                check_bind(host, token)


@pytest.mark.parametrize(
    "values",
    [
        {"unknown": 1},
        {"port": -1},
        {"tool_parser": "xml"},
        {"request_timeout_s": 0},
        {"drain_timeout_s": float("inf")},
        {"control_timeout_s": 1e12},
        {"temperature": float("inf")},
    ],
)
def test_bad_settings_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        parse_config(values)


def test_files_flags_and_defaults_in_order(tmp_path: Path) -> None:
    toml = tmp_path / "serve.toml"
    toml.write_text('model = "tiny"\nport = 1234\nserved_model_names = ["a"]\n')
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = ["--config", str(toml), "--port", "99", "--allow-weight-edit", "--top-k", "5"]
    config = serve.read_settings(parser.parse_args(given))
    assert (config.model, config.port, config.top_k) == ("tiny", 99, 5)
    assert config.served_model_names == ("a",)
    assert config.allow_weight_edit
    assert config.host == ServerConfig().host == "127.0.0.1"
    as_json = tmp_path / "serve.json"
    as_json.write_text(json.dumps({"model": "tiny", "allow_weight_edit": True}))
    given = ["--config", str(as_json), "--no-allow-weight-edit"]
    assert not serve.read_settings(parser.parse_args(given)).allow_weight_edit


def test_every_setting_has_a_flag_with_an_explanation() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    helps = {action.dest: action.help for action in parser._actions}
    for name in ServerConfig.model_fields:
        assert helps[name], name


@pytest.mark.parametrize("text", ["port = ", "[1]", "\x00"])
def test_unreadable_files_are_refused(tmp_path: Path, text: str) -> None:
    for name in ("a.toml", "a.json"):
        path = tmp_path / name
        path.write_text(text)
        if name.endswith("toml") and text == "[1]":
            continue  # an empty table in TOML
        with pytest.raises(ConfigError, match="configuration file"):
            read_config_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--host", "0.0.0.0"], "token"),
        (["--port", "70000"], "port"),
        (["--config", "/nonexistent.toml"], "cannot be read"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_bad_usage_ends_with_2_and_one_line(
    arguments: list[str],
    word: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKENPLANE_CONTROL_TOKEN", raising=False)
    assert serve.main(["--model", "tiny", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert word in shown.err
    assert len(shown.err.strip().splitlines()) == 1


def test_a_gpu_without_room_is_an_error_in_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_model: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_model, "gpu_twin", no_room)
    assert serve.main(["--model", "tiny", "--store", "memory:", "--engine", "dynamic"]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("tokenplane serve: engine_error: the dynamic engine did not start")
    assert said.endswith("OutOfMemoryError: CUDA out of memory")


def test_a_store_that_ends_with_the_server_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for store, warnings in (("memory:", 1), (f"file://{tmp_path}/store", 0)):
        caplog.clear()
        assert serve.main(["--model", "none", "--store", store]) == 2
        assert [r.levelname for r in caplog.records if "--store" in r.getMessage()] == (
            ["WARNING"] * warnings
        )


def test_what_cannot_be_opened_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--model", "tiny", "--store", "nosuch://x"]) == 1
    assert serve.main(["--model", "none", "--store", "memory:"]) == 2
    shown = capsys.readouterr()
    assert "unsupported_store" in shown.err
    assert "no such model" in shown.err
    assert "Traceback" not in shown.err
