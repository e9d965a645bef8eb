"""Gym's rollouts file and manifest route: ids, outcomes, and each way to fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tokenplane.capture.collect.gym_rollouts import (
    GymManifests,
    read_outcomes,
    rollout_id_of,
    to_outcome,
)
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    InvalidRecordError,
    LedgerError,
    StoreUnavailableError,
    TokenplaneError,
)


def test_rollout_ids() -> None:
    assert rollout_id_of({"_ng_task_index": 3, "_ng_rollout_index": 0}) == "3-0"
    assert rollout_id_of({"_ng_task_index": 3, "_ng_rollout_index": 1, "_ng_attempt_index": 2}) == (
        "3-1-a2"
    )
    assert rollout_id_of({"_ng_rollout_id": "x.1", "_ng_attempt_index": 0}) == "x.1"
    with pytest.raises(InvalidRecordError):
        rollout_id_of({"_ng_task_index": 3})
    with pytest.raises(LedgerError):
        rollout_id_of({"_ng_rollout_id": "../x"})


@pytest.mark.parametrize(
    ("attempt", "ident"), [(None, "x"), (-1, "x"), ("0", "x"), ("2", "x-a2"), (True, "x-a1")]
)
def test_an_attempt_is_read_as_gym_reads_it(attempt: Any, ident: str) -> None:
    """With ``int``, and only what is above 0 counts (its ``rollout_correlation``)."""
    assert rollout_id_of({"_ng_rollout_id": "x", "_ng_attempt_index": attempt}) == ident


@pytest.mark.parametrize("attempt", ["b", [], {}, float("nan"), float("inf")], ids=repr)
def test_an_attempt_that_is_no_number_is_refused(attempt: Any) -> None:
    with pytest.raises(InvalidRecordError, match="_ng_attempt_index"):
        rollout_id_of({"_ng_rollout_id": "x", "_ng_attempt_index": attempt})


def test_outcomes(tmp_path: Path) -> None:
    record = {
        "_ng_task_index": 1,
        "_ng_rollout_index": 0,
        "reward": 1,
        "response": {"id": "resp-1", "output": []},
    }
    outcome = to_outcome(record)
    assert (outcome.reward, outcome.group_id, outcome.response_id) == (1.0, "1", "resp-1")
    assert to_outcome({"_ng_rollout_id": "a"}).scored is None
    with pytest.raises(InvalidRecordError):
        to_outcome({**record, "reward": "high"})
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    assert len(list(read_outcomes(path))) == 2
    path.write_text(json.dumps(record) + "\nnot json\n")
    with pytest.raises(InvalidRecordError) as caught:
        list(read_outcomes(path))
    assert caught.value.key == "rollouts.jsonl:2"
    with pytest.raises(ConfigError):
        list(read_outcomes(tmp_path / "nothing"))


GOOD = b'{"_ng_rollout_id": "a"}'
BAD_LINES: list[tuple[bytes, str]] = [
    (b"\xff\xfe", "invalid_record"),
    (b'{"_ng_rollout_id": "\xff"}', "invalid_record"),
    (b"[" * 100_000, "invalid_record"),
    (b"[]", "invalid_record"),
    (b"{}", "invalid_record"),
    (b'{"_ng_rollout_id": "a", "_ng_attempt_index": "b"}', "invalid_record"),
    *(
        (b'{"_ng_rollout_id": "a", "reward": %b}' % reward, "invalid_record")
        for reward in (b"NaN", b"-Infinity", b"1e999", b"1" * 400, b'"1"', b"true", b"[1]")
    ),
    (b'{"_ng_rollout_id": "a b"}', "invalid_rollout_id"),
    (b'{"_ng_rollout_id": 5}', "invalid_rollout_id"),
]


@pytest.mark.parametrize(("line", "code"), BAD_LINES, ids=lambda value: repr(value)[:40])
def test_whatever_is_wrong_with_a_line_names_it(line: bytes, code: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n")
    with pytest.raises(TokenplaneError) as caught:
        list(read_outcomes(path))
    assert (caught.value.code, caught.value.key) == (code, "rollouts.jsonl:3")


class Gym(BaseHTTPRequestHandler):
    """A control route that answers what ``answers`` holds, and remembers what it was asked."""

    answers: Any = None
    seen: Any = None

    def do_GET(self) -> None:
        type(self).seen.append((self.path, self.headers["Authorization"]))
        status, body, delay = type(self).answers
        delay.wait(5)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


NOW = threading.Event()
NOW.set()


@pytest.fixture
def gym() -> Iterator[Any]:
    Gym.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gym)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_manifest_is_asked_for_with_the_secret(gym: Any) -> None:
    Gym.answers = (200, json.dumps({"rollout_id": "0-1"}), NOW)
    with GymManifests(f"http://127.0.0.1:{gym.server_port}/", "secret") as manifests:
        assert manifests.manifest("0-1").records == []
    assert Gym.seen == [("/training-token-capture/control/rollouts/0-1/manifest", "Bearer secret")]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, "{}", ConfigError),
        (404, "{}", ConfigError),
        (500, "{}", StoreUnavailableError),
        (200, "<html>a proxy</html>", ConfigError),
        (200, "[" * 100_000, ConfigError),
        (200, "[]", ConfigError),
        (200, '{"rollout_id": "other"}', InvalidRecordError),
        (200, '{"rollout_id": "0-1", "extra": 1}', ConfigError),
        (200, '{"error": "try again"}', ConfigError),
        (200, '{"rollout_id": "0-1", "records": [7]}', InvalidRecordError),
    ],
)
def test_each_bad_answer_is_its_own_error(
    gym: Any, status: int, body: str, error: type[TokenplaneError]
) -> None:
    Gym.answers = (status, body, NOW)
    with (
        GymManifests(f"http://127.0.0.1:{gym.server_port}", "s") as manifests,
        pytest.raises(error),
    ):
        manifests.manifest("0-1")


def test_a_silent_server_meets_the_deadline(gym: Any) -> None:
    later = threading.Event()
    Gym.answers = (200, "{}", later)
    with GymManifests(f"http://127.0.0.1:{gym.server_port}", "s", timeout_s=0.2) as manifests:
        with pytest.raises(DeadlineError):
            manifests.manifest("0-1")
        later.set()
    with (
        GymManifests("http://127.0.0.1:9", "s") as manifests,
        pytest.raises(StoreUnavailableError),
    ):
        manifests.manifest("0-1")


SETTINGS: list[dict[str, Any]] = [
    *({"base_url": url} for url in ("", "gym", "ftp://gym", "http://", "http://[::1")),
    *({"token": token} for token in ("", " ", "é", "a\nb")),
    *({"timeout_s": seconds} for seconds in (0, -1, float("nan"), float("inf"))),
]


@pytest.mark.parametrize("wrong", SETTINGS, ids=repr)
def test_a_wrong_setting_is_no_verdict_on_a_rollout(wrong: dict[str, Any]) -> None:
    """Found before anything is asked: else every rollout would be published as a placeholder."""
    with pytest.raises(ConfigError):
        GymManifests(**{"base_url": "http://127.0.0.1:9", "token": "s", **wrong})
