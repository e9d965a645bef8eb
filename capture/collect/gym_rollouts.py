"""NeMo-Gym's side of a collection: its rollouts file and its manifest route."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.capture.ledger import check_rollout_id
from tokenplane.schemas.errors import (
    ConfigError,
    DeadlineError,
    InvalidRecordError,
    LedgerError,
    StoreUnavailableError,
)
from tokenplane.schemas.manifest import RolloutManifest
from tokenplane.schemas.wire import parse_model

MAX_TIMEOUT_S = 86_400.0
MANIFEST_PATH = "/training-token-capture/control/rollouts/{}/manifest"


def rollout_id_of(record: Mapping[str, Any]) -> str:
    """The capture id of a rollout record (CONTRACT section 13).

    ``_ng_rollout_id`` where it is set, else ``<task>-<rollout>``; ``-a<n>`` for attempt n > 0.

    Raises:
        InvalidRecordError: the record carries neither, or an attempt that is no number.
        LedgerError: the id is malformed.
    """
    ident = record.get("_ng_rollout_id")
    if ident is None:
        task, rollout = record.get("_ng_task_index"), record.get("_ng_rollout_index")
        if task is None or rollout is None:
            raise InvalidRecordError(
                "a rollout record needs _ng_rollout_id, or _ng_task_index and _ng_rollout_index",
                got=sorted(record)[:12],
            )
        ident = f"{task}-{rollout}"
    check_rollout_id(ident)
    attempt = record.get("_ng_attempt_index")
    try:
        number = 0 if attempt is None else int(attempt)  # as Gym reads it
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidRecordError("_ng_attempt_index", expected="a number", got=attempt) from exc
    if number > 0:
        ident = f"{ident}-a{number}"
        check_rollout_id(ident)
    return str(ident)


def to_outcome(record: Mapping[str, Any]) -> RolloutOutcome:
    """What a rollout record says: reward, group (its task), and the scored response as witness.

    Raises:
        InvalidRecordError: no rollout id, or a reward that is no finite number.
        LedgerError: the id is malformed.
    """
    response = record.get("response")
    scored = response if isinstance(response, Mapping) else None
    reward = record.get("reward")
    if isinstance(reward, bool):
        raise InvalidRecordError("reward", expected="a number or null", got=repr(reward))
    task = record.get("_ng_task_index")
    return RolloutOutcome(
        rollout_id=rollout_id_of(record),
        reward=reward,
        group_id=None if task is None else str(task),
        response_id=None if scored is None else scored.get("id"),
        scored=scored,
    )


def read_outcomes(path: Path) -> Iterator[RolloutOutcome]:
    """The outcomes of a rollouts file (JSON lines), in order; blank lines are skipped.

    Raises:
        InvalidRecordError: names the line that is no rollout record.
        LedgerError: names the line with a malformed rollout id.
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_line(line, f"{path.name}:{number}")
    except OSError as exc:
        raise ConfigError(f"cannot read the rollouts file: {exc.strerror}", key=str(path)) from exc


def _parse_line(line: bytes, where: str) -> RolloutOutcome:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:  # not UTF-8 is a ValueError too
        raise InvalidRecordError("not a JSON line", key=where) from exc
    if not isinstance(record, dict):
        raise InvalidRecordError("a rollout record is an object", key=where)
    try:
        return to_outcome(record)
    except (InvalidRecordError, LedgerError) as exc:
        raise type(exc)(
            exc.message, code=exc.code, key=where, expected=exc.expected, got=exc.got
        ) from exc


class GymManifests:
    """Reads manifests from a Gym model server's control route. Thread-safe; a context manager.

    Args:
        base_url: of the model server, without a path.
        token: the control secret (``NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN`` there).
        timeout_s: of each request; there are no silent retries.

    Raises:
        ConfigError: not an http(s) URL, a secret that no header can hold, or a timeout not
            above 0 or beyond a day.
    """

    def __init__(self, base_url: str, token: str, *, timeout_s: float = 60.0) -> None:
        _check_settings(base_url, token, timeout_s)
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            base_url=base_url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
        )

    def manifest(self, rollout_id: str) -> RolloutManifest:
        """The rollout's manifest; empty lists where Gym knows nothing of it.

        Raises:
            DeadlineError: no answer in time.
            StoreUnavailableError: no connection, or the server failed.
            ConfigError: the secret is refused (401), there is no such route (404), or what answers
                is no manifest at all or one of another contract: that would be so of every rollout.
            InvalidRecordError: a damaged manifest, or another rollout's.
        """
        check_rollout_id(rollout_id)
        try:
            reply = self._client.get(MANIFEST_PATH.format(quote(rollout_id, safe="")))
        except httpx.TimeoutException as exc:
            raise DeadlineError(
                "the Gym model server did not answer", expected=f"within {self._timeout_s:g} s"
            ) from exc
        except httpx.HTTPError as exc:
            raise StoreUnavailableError(f"the Gym model server: {exc}", key=rollout_id) from exc
        if reply.status_code in (401, 403, 404):
            raise ConfigError(
                f"the Gym model server answered {reply.status_code}: "
                "check the URL, that external staging is on, and the control secret",
                key=rollout_id,
            )
        if reply.status_code != 200:
            raise StoreUnavailableError(
                f"the Gym model server answered {reply.status_code}", key=rollout_id
            )
        _check_shape(reply, rollout_id)
        manifest = parse_model(RolloutManifest, reply.content, key=rollout_id)
        if manifest.rollout_id != rollout_id:
            raise InvalidRecordError(
                "another rollout's manifest", expected=rollout_id, got=manifest.rollout_id
            )
        return manifest

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_shape(reply: httpx.Response, rollout_id: str) -> None:
    """The fields of a manifest, whatever is in them."""
    known = set(RolloutManifest.model_fields)
    try:
        value = reply.json()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or "rollout_id" not in value or not known.issuperset(value):
        raise ConfigError(
            "what answered gives no manifest of NeMo-Gym 0.7.0: check the URL and Gym's version",
            key=rollout_id,
            expected=f"JSON with {sorted(known)}",
            got=sorted(value)[:8] if isinstance(value, dict) else reply.content[:40],
        )


def _check_settings(base_url: str, token: str, timeout_s: float) -> None:
    try:
        url = httpx.URL(base_url)
        usable = url.scheme in ("http", "https") and bool(url.host)
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise ConfigError(
            "URL of the Gym model server", expected="http://HOST:PORT", got=repr(base_url)
        )
    if not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("the control secret", expected="printable ASCII")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            "timeout", expected=f"above 0, at most {MAX_TIMEOUT_S:g} s", got=timeout_s
        )
