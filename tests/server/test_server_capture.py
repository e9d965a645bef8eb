"""Capture never fails a completion; what it cannot do is served, coded, and kept."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import pyarrow as pa
import pytest

from tests.server.serving import (
    message_of,
    say,
    scripted,
    serving,
    text_of,
    tiny,
    user,
)
from tokenplane.engine_adapter.engine import GenerationRequest, GenerationResult
from tokenplane.engine_adapter.scripted_engine import ScriptedEngine
from tokenplane.schemas.errors import StoreFullError, StoreUnavailableError
from tokenplane.schemas.failure_row import FAILURE_PARTITION
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.staging.memory_backend.store import MemoryStore


class FaultyStore(MemoryStore):
    """Fails where a test says so."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        self.broken = set(broken)

    def put(self, partition: str, key: str, row: pa.RecordBatch, **kwargs: Any) -> bool:
        if f"put {partition}" in self.broken:
            raise StoreFullError("no room", key=key)
        return super().put(partition, key, row, **kwargs)

    def keys(self, partition: str, prefix: str = "") -> list[str]:
        if "keys" in self.broken:
            raise StoreUnavailableError("nobody answers")
        return super().keys(partition, prefix)

    def get(self, partition: str, keys: Any, columns: Any = None) -> list[pa.RecordBatch]:
        if "get" in self.broken:
            raise StoreUnavailableError("nobody answers")
        return super().get(partition, keys, columns)

    def stats(self, *args: Any, **kwargs: Any) -> Any:
        if "stats" in self.broken:
            raise StoreUnavailableError("nobody answers")
        return super().stats(*args, **kwargs)


async def test_a_full_store_serves_the_answer_and_loses_the_next_turns_parent() -> None:
    store = FaultyStore(f"put {STAGED_PARTITION}")
    async with serving(scripted([say("Hi."), say("Ho."), say("Hm.")]), store=store) as served:
        reply = await served.chat([user("a")])
        assert text_of(reply) == "Hi."
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        (failure,) = served.parts.ledger.failures("r1")
        assert failure.code == "stage_failed"
        assert "store_full" in failure.message
        assert failure.model_call_id == reply.headers["x-tokenplane-call"]
        store.broken.clear()
        fresh = await served.chat([user("b")])
        assert fresh.headers["x-tokenplane-capture"] == "staged"
        after = await served.chat([user("a"), message_of(reply), user("c")])
        assert after.headers["x-tokenplane-capture"] == "unproven"
        assert await served.failures() == ["stage_failed", "unresolved_parent"]


async def test_a_store_that_takes_nothing_at_all_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FaultyStore(f"put {STAGED_PARTITION}", f"put {FAILURE_PARTITION}")
    async with serving(scripted([say("Hi.")]), store=store) as served:
        with caplog.at_level(logging.WARNING):
            reply = await served.chat([user("a")])
        assert text_of(reply) == "Hi."
        assert served.parts.failures.counts() == {"stage_failed": 1}
        assert "a failure row waits for the store: store_full" in caplog.text
        metrics = (await served.client.get("/metrics")).text
        assert 'tokenplane_capture_failures_total{code="stage_failed"} 1.0' in metrics
        # The rollout must not look complete, neither now nor to whoever reads the store later.
        call = reply.headers["x-tokenplane-call"]
        lost = {"schema_version": 2, "model_call_id": call, "reason": "stage_failed"}
        assert await served.failures() == ["stage_failed"]
        assert (await served.client.get("/rollouts/r1/manifest")).json()["failures"] == [lost]
        assert (await served.client.get("/rollouts/r2/manifest")).json()["failures"] == []
        assert served.parts.ledger.failures("r1") == []
        store.broken.clear()
    assert [row.model_call_id for row in served.parts.ledger.failures("r1")] == [call]


async def test_a_ledger_that_cannot_be_read_serves_without_capture() -> None:
    store = FaultyStore("keys")
    async with serving(scripted([say("Hi.")]), store=store) as served:
        reply = await served.chat([user("a")])
        assert text_of(reply) == "Hi."
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        assert served.parts.failures.counts() == {"store_unavailable": 1}
        assert not served.rows()


async def test_a_prefix_that_cannot_be_read_is_refused() -> None:
    store = FaultyStore()
    async with serving(scripted([say("Hi.")]), store=store, prefix_cache_bytes=0) as served:
        said = message_of(await served.chat([user("a")]))
        await served.client.get("/rollouts/r1/manifest")  # the ledger's index is warm now
        store.broken.add("get")
        reply = await served.chat([user("a"), said, user("b")])
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "prefix_store_failure"
        assert len(served.script.requests) == 1


async def test_without_a_weight_version_nothing_is_staged() -> None:
    async with serving(scripted([say("Hi.")]), version=None) as served:
        reply = await served.chat([user("a")])
        assert text_of(reply) == "Hi."
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        assert await served.failures() == ["no_policy_epoch"]


async def test_history_of_elsewhere_is_a_root_only_in_an_empty_rollout() -> None:
    """Few-shot turns start a rollout; later they would be a second, unproven one."""
    seeded = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    async with serving(scripted([say("1"), say("2"), say("3")])) as served:
        first = await served.chat(seeded)
        assert first.headers["x-tokenplane-capture"] == "staged"
        edited = [user("changed"), *seeded[1:], message_of(first), user("d")]
        reply = await served.chat(edited)
        assert reply.headers["x-tokenplane-capture"] == "unproven"
        assert text_of(reply) == "2"
        assert await served.failures() == ["unresolved_parent"]
        assert len(served.rows()) == 1
        manifest = (await served.client.get("/rollouts/r1/manifest")).json()
        assert len(manifest["records"]) == 1
        assert [entry["reason"] for entry in manifest["failures"]] == ["unresolved_parent"]


def lossy_tokenizer() -> Any:
    """A template that drops user turns after an assistant's: no boundary can be proven there."""
    tokenizer = copy.deepcopy(tiny().tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.first or m.role == 'assistant' %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer


async def test_a_boundary_that_cannot_be_proven_is_refused_with_its_code() -> None:
    script = [say("Hi."), say("Ho.")]
    async with serving(scripted(script), tokenizer=lossy_tokenizer()) as served:
        said = message_of(await served.chat([user("a")]))
        reply = await served.chat([user("a"), said, user("b")])
        assert reply.status_code == 409
        error = reply.json()["error"]
        assert error["type"] == "conflict_error"
        assert await served.failures() == [error["code"]]
        assert len(served.script.requests) == 1
        plain = await served.chat([user("a"), said, user("b")], rollout=None)
        assert text_of(plain) == "Ho."


class OtherPromptEngine(ScriptedEngine):
    """Conditions on something else than it was given, as an engine does that re-tokenizes."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        return dataclasses.replace(result, prompt_token_ids=result.prompt_token_ids[:-1])


@pytest.mark.parametrize("gym", [False, True])
async def test_an_engine_that_changes_the_prompt_is_not_believed(gym: bool) -> None:
    engine = OtherPromptEngine(tiny().info, lambda _request: say("Hi."), tiny().detokenize)
    admission = {"rollout_id": "r1", "model_call_id": "c1", "mode": "text"}
    body = {"ng_capture": admission} if gym else {}
    async with serving(engine) as served:
        reply = await served.chat([user("a")], rollout=None if gym else "r1", **body)
        assert text_of(reply) == "Hi."
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        assert await served.failures() == ["engine_prompt_differs"]
        assert not served.rows()
        if gym:
            coords = reply.json()["ng_commit_coords"]
            assert coords["disposition"] == "capture_failed"
            assert coords["weight_version"] == 7


async def test_an_ancestor_that_retention_removed_is_a_failure_of_ours() -> None:
    async with serving(scripted([say("1"), say("2")])) as served:
        messages = [user("a")]
        messages += [message_of(await served.chat(messages)), user("b")]
        messages += [message_of(await served.chat(messages)), user("c")]
        root = served.rows()[0].staging_key
        assert served.store.discard(STAGED_PARTITION, [root]) == 1
        reply = await served.chat(messages)
        assert reply.status_code == 409
        assert reply.json()["error"]["code"] == "unknown_parent"
        assert await served.failures() == ["unknown_parent"]


async def test_a_truncated_turn_is_continued_with_the_templates_terminator() -> None:
    script = [say("cut off here", end=""), say("Ho.")]
    async with serving(scripted(script)) as served:
        said = await served.chat([user("a")], max_tokens=3)
        assert said.json()["choices"][0]["finish_reason"] == "length"
        reply = await served.chat([user("a"), message_of(said), user("b")])
        assert reply.headers["x-tokenplane-capture"] == "staged"
        row = served.rows()[1]
        assert "terminator_inserted" in row.evidence.splice_notes
        assert row.call.token_mask_delta[0] == 0


async def test_a_client_that_changes_our_words_does_not_change_the_tokens() -> None:
    """The answer is echoed trimmed: another conversation, so it is not silently stitched."""
    async with serving(scripted([say("  Hi.  "), say("Ho.")])) as served:
        await served.chat([user("a")])
        trimmed = [user("a"), {"role": "assistant", "content": "Hi."}, user("b")]
        reply = await served.chat(trimmed)
        assert reply.headers["x-tokenplane-capture"] == "unproven"


async def test_a_server_reads_none_of_its_own_rows_back() -> None:
    class Counting(MemoryStore):
        reads = 0

        def get(self, *args: Any, **kwargs: Any) -> list[pa.RecordBatch]:
            self.reads += 1
            return super().get(*args, **kwargs)

    store = Counting()
    async with serving(scripted([say("Hi."), say("Ho."), say("Hm.")]), store=store) as served:
        messages = [user("one")]
        for text in ("two", "three", "four"):
            reply = await served.chat(messages)
            messages = [*messages, message_of(reply), user(text)]
        assert [row.call.mode for row in served.rows()] == ["text", "token_in", "token_in"]
        assert store.reads == 0
