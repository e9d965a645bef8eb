"""Kinds of failure that other systems had (docs/cases.md), tried on the whole server."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.server.serving import (
    TOOLS,
    Served,
    encode,
    events_of,
    message_of,
    say,
    scripted,
    serving,
    tiny,
    user,
    whole,
)
from tokenplane.capture.collect.collector import Collector
from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.engine_adapter.engine import GenerationRequest, GenerationResult
from tokenplane.engine_adapter.scripted_engine import ScriptedEngine
from tokenplane.schemas.training_row import TrainingRow
from tokenplane.staging.token_source import TokenSource

CALL = '<tool_call>{"name": "add", "arguments": {"a":  1, "b": 2.50}}</tool_call>'


def collected(served: Served, response_id: str) -> TrainingRow:
    outcome = RolloutOutcome("r1", response_id=response_id)
    [row] = Collector(TokenSource(served.store), served.parts.ledger).finalize(outcome)
    assert row.sample_mask == 1, row.reason
    return row


async def test_words_that_a_harness_put_into_the_models_mouth_are_never_trained_on() -> None:
    """D8: few-shot answers, and an answer that a harness made up, are context and no loss."""
    script = [say("One."), say("Two."), say("Three.")]
    seeded = [user("a"), {"role": "assistant", "content": "Made up."}, user("b")]
    async with serving(scripted(script)) as served:
        messages = [*seeded, message_of(await served.chat(seeded)), user("c")]
        # A turn that nobody sampled: it cannot be stitched, so it is served without a row.
        forged = [*messages, {"role": "assistant", "content": "Forged."}, user("d")]
        reply = await served.chat(forged)
        assert reply.headers["x-tokenplane-capture"] == "unproven"
        last = await served.chat(messages)
        assert last.headers["x-tokenplane-capture"] == "staged"
        row = collected(served, last.json()["id"])
        trained = row.token_ids[row.token_mask == 1].tolist()
        assert trained == [token for at in (0, 2) for token, _ in script[at]]
        text = tiny().detokenize(row.token_ids.tolist())
        assert "Made up." in text
        assert "Forged." not in text
        assert (row.log_probs[row.token_mask == 0] == 0).all()
        assert (row.weight_versions[row.token_mask == 0] == -1).all()


@pytest.mark.parametrize("tools", [True, False])
async def test_a_stream_captures_ids_that_its_text_never_shows(tools: bool) -> None:
    """D9: structural tokens and tool calls never reach the stream; the row has them all."""
    answer = say(f"<|im_start|>Two.{CALL}<|im_start|>")
    body: dict[str, Any] = {"tools": TOOLS} if tools else {}
    async with serving(scripted([answer, say("Done.")])) as served:
        reply = await served.chat([user("?")], stream=True, **body)
        assert ": tokenplane-capture staged" in reply.text
        assert "<|im_start|>" not in reply.text
        [row] = served.rows()
        sampled = row.call.token_mask_delta == 1
        assert row.call.token_ids_delta[sampled].tolist() == [token for token, _ in answer]
        wanted = np.array([value for _, value in answer], np.float32)
        assert row.call.generation_log_probs_delta[sampled].tobytes() == wanted.tobytes()
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events_of(reply.text)[:-1]]
        said: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(delta.get("content") or "" for delta in deltas),
        }
        assert said["content"] == ("Two." if tools else f"Two.{CALL}")
        if tools:
            [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
            said["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in calls
            ]
        after = await served.chat([user("?"), said, user("b")], **body)
        assert after.headers["x-tokenplane-capture"] == "staged"


async def test_special_tokens_inside_an_answer_shift_nothing() -> None:
    """D11: text without the special tokens is shorter than the ids; no length is taken from it."""
    answer = say("a<|im_start|><|im_start|>b<|im_start|>")
    async with serving(scripted([answer, say("c")])) as served:
        said = message_of(await served.chat([user("a")]))
        assert said["content"] == "ab"
        observation = {"role": "tool", "content": "seen", "tool_call_id": "x"}
        reply = await served.chat([user("a"), said, observation])
        assert reply.headers["x-tokenplane-capture"] == "staged"
        prompt = served.script.requests[1].prompt_token_ids.tolist()
        prefix = whole(served.rows()[:1]).tolist()
        new = encode("\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n")
        assert prompt == [*prefix, *new]


class OtherSamplingEngine(ScriptedEngine):
    """Samples in another way than it was asked to, and says so."""

    changes: dict[str, Any]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        return dataclasses.replace(
            result, sampling=dataclasses.replace(result.sampling, **self.changes)
        )


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 0}, {"temperature": 1.0}, {"top_p": 1.0}, {"seed": 4}, {"max_tokens": 9}],
)
@pytest.mark.parametrize("gym", [False, True])
async def test_an_engine_that_samples_otherwise_is_not_recorded_as_asked(
    gym: bool, changes: dict[str, Any]
) -> None:
    """D24: a parameter that was ignored on the way changes what a trainer must correct for."""
    engine = OtherSamplingEngine(tiny().info, lambda _request: say("Hi."), tiny().detokenize)
    engine.changes = changes
    body: dict[str, Any] = {
        "top_k": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 3,
        "max_tokens": 8,
    }
    if gym:
        body["ng_capture"] = {"rollout_id": "r1", "model_call_id": "c1", "mode": "text"}
    async with serving(engine) as served:
        reply = await served.chat([user("a")], rollout=None if gym else "r1", **body)
        assert reply.headers["x-tokenplane-capture"] == "capture_failed"
        assert await served.failures() == ["sampling_differs"]
        assert next(iter(changes)) in served.parts.failures.recent("r1")[0].message
        assert not served.rows()
        engine.changes = {}
        again = await served.chat([user("a")], rollout=None if gym else "r1", **body)
        assert again.headers["x-tokenplane-capture"] == "staged"


async def test_a_turn_asks_for_the_routes_of_its_own_tokens_only() -> None:
    """D26: the rows of the prefix have its routes already."""
    async with serving(scripted([say("a"), say("b"), say("c"), say("d")])) as served:
        messages = [user("a")]
        for text in "bc":
            messages += [message_of(await served.chat(messages)), user(text)]
        await served.chat(messages)
        await served.chat(messages, rollout=None)
        lengths = [0, *(row.call.cum_len for row in served.rows()[:2]), 0]
        assert [request.routes_from for request in served.script.requests] == lengths
