"""Tool calls through the server: parsed for the agent, exact for the trainer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import (
    TOOLS,
    encode,
    events_of,
    message_of,
    say,
    scripted,
    serving,
    text_of,
    user,
    whole,
)

CALL = '<tool_call>{"name": "add", "arguments": {"a":  1, "b": 2.50}}</tool_call>'


async def test_a_tool_loop_is_conditioned_on_what_the_model_wrote() -> None:
    """The arguments' odd spacing would not survive a re-render; the staged ids do."""
    script = [say(f"Let me see.\n{CALL}"), say("It is 3.5."), say("Bye.")]
    async with serving(scripted(script)) as served:
        messages = [user("1 + 2.5?")]
        first = message_of(await served.chat(messages, tools=TOOLS))
        assert first["content"] == "Let me see."
        (call,) = first["tool_calls"]
        assert call["type"] == "function"
        assert call["function"] == {"name": "add", "arguments": '{"a":  1, "b": 2.50}'}
        assert call["id"].startswith("call_")
        assert len(call["id"]) == 29
        echoed = json.loads(json.dumps(first | {"refusal": None, "audio": None}))
        messages += [echoed, {"role": "tool", "tool_call_id": call["id"], "content": "3.5"}]
        second = await served.chat(messages, tools=TOOLS)
        assert text_of(second) == "It is 3.5."
        messages += [message_of(second), user("Thanks.")]
        third = await served.chat(messages, tools=TOOLS)
        assert [r.headers["x-tokenplane-capture"] for r in (second, third)] == ["staged"] * 2
        rows = served.rows()
        written = [token for token, _ in script[0]]
        assert rows[0].call.token_ids_delta[-len(written) :].tolist() == written
        asked = served.script.requests
        for turn in (1, 2):
            prefix = whole(rows[:turn]).tolist()
            assert asked[turn].prompt_token_ids[: len(prefix)].tolist() == prefix
            assert asked[turn].prompt_token_ids.tolist().count(encode("<|im_start|>")[0]) == (
                3 + 2 * turn
            )
        suffix = rows[1].call.token_ids_delta[rows[1].call.token_mask_delta == 0].tolist()
        assert suffix == encode("\n<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>assistant\n")


async def test_finish_reasons() -> None:
    cut = say(CALL)[:-6]
    async with serving(scripted([say(CALL), say("No."), cut, say(CALL)])) as served:
        replies = [
            await served.chat([user("?")], rollout=None, **body)
            for body in (
                {"tools": TOOLS},
                {"tools": TOOLS},
                {"tools": TOOLS, "max_tokens": len(cut)},
                {"tools": TOOLS, "tool_choice": "none"},
            )
        ]
        choices = [reply.json()["choices"][0] for reply in replies]
        assert [choice["finish_reason"] for choice in choices] == [
            "tool_calls",
            "stop",
            "length",
            "stop",
        ]
        assert choices[0]["message"]["content"] is None
        assert "tool_calls" not in choices[2]["message"]
        assert choices[2]["message"]["content"].startswith("<tool_call>")
        assert choices[3]["message"]["content"] == CALL


async def test_without_tools_nothing_is_parsed() -> None:
    async with serving(scripted([say(CALL)])) as served:
        assert text_of(await served.chat([user("?")])) == CALL


async def test_parallel_calls_have_different_ids_and_stream_as_deltas() -> None:
    async with serving(scripted([say(f"Two.{CALL}{CALL}")] * 2)) as served:
        answer = message_of(await served.chat([user("?")], tools=TOOLS))
        ids = [call["id"] for call in answer["tool_calls"]]
        assert len(set(ids)) == 2
        reply = await served.chat([user("?")], rollout="r2", tools=TOOLS, stream=True)
        chunks = [json.loads(event) for event in events_of(reply.text)[:-1]]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[1] == {"content": "Two."}
        assert [call["index"] for call in deltas[2]["tool_calls"]] == [0, 1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert "<tool_call>" not in reply.text


async def test_other_tools_are_another_conversation() -> None:
    """A continuation under changed tools must not be stitched to the old prefix."""
    async with serving(scripted([say("Hi."), say("Hm."), say("Ho.")])) as served:
        said = message_of(await served.chat([user("a")], tools=TOOLS))
        messages = [user("a"), said, user("b")]
        changed: list[dict[str, Any]] = json.loads(json.dumps(TOOLS))
        changed[0]["function"]["description"] = "Subtract."
        reply = await served.chat(messages, tools=changed)
        assert reply.headers["x-tokenplane-capture"] == "unproven"
        assert text_of(reply) == "Hm."
        assert await served.failures() == ["unresolved_parent"]
        kept = await served.chat(messages, tools=TOOLS)
        assert kept.headers["x-tokenplane-capture"] == "staged"


@pytest.mark.parametrize("split", [True, False])
async def test_thoughts_stay_in_the_content_unless_split_off(split: bool) -> None:
    script = [say("<think>\nHm.\n</think>\n\nYes."), say("Ok.")]
    async with serving(scripted(script), split_reasoning=split) as served:
        answer = message_of(await served.chat([user("?")]))
        if split:
            assert answer == {
                "role": "assistant",
                "content": "Yes.",
                "reasoning_content": "Hm.",
            }
        else:
            assert answer["content"] == "<think>\nHm.\n</think>\n\nYes."
            assert "reasoning_content" not in answer
        reply = await served.chat([user("?"), answer, user("Sure?")])
        assert reply.headers["x-tokenplane-capture"] == "staged"
        prefix = whole(served.rows()[:1]).tolist()
        assert served.script.requests[1].prompt_token_ids[: len(prefix)].tolist() == prefix
