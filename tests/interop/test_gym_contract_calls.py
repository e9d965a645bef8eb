"""The capture core against the real NeMo-Gym's: begin, complete, stage, and complete again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.interop.gym_contract import Both, GymContract, as_binary32, ask_both
from tests.schemas.strategies import EXTRAS, HEX, IDS, LOG_PROBS, TOKEN_IDS, VERSIONS
from tokenplane.schemas.tokens import INT32_MAX

LOG_COLUMN = "generation_log_probs_delta"


def agree(both: Both) -> Both:
    """As ``Both.agree``; records are compared as binary32, which is all that a column keeps."""
    if both.accepted:
        for side in (both.gym["value"], both.ours["value"]):
            for record, _ in side["stored"]:
                record[LOG_COLUMN] = as_binary32(record[LOG_COLUMN])
        return both.agree()
    assert both.ours["rejected"] == both.gym["rejected"], both
    return both


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    """A call that both sides capture, through any of the ways a prefix can come."""
    prefix = draw(st.lists(TOKEN_IDS, min_size=1, max_size=4))
    more = draw(st.lists(TOKEN_IDS, max_size=4))
    generated = draw(st.lists(TOKEN_IDS, max_size=4))
    root = draw(st.booleans())
    if not more and not generated:
        generated = [draw(TOKEN_IDS)]
    admission: dict[str, Any] = {
        "rollout_id": draw(IDS),
        "model_call_id": draw(IDS),
        "mode": "text" if root else "token_in",
    }
    begin: dict[str, Any] = {}
    if not root:
        admission |= {
            "parent_call_id": draw(IDS),
            "prev_len": len(prefix),
            "parent_chain_hash": draw(HEX),
        }
        how = draw(st.sampled_from(["inline", "chain", "both"]))
        if how != "inline":
            admission["staging_chain"] = ["a/b"]
            begin["prefix_token_ids"] = prefix
        if how != "chain":
            admission["required_prefix_token_ids"] = prefix
    elif draw(st.booleans()):
        begin["prefix_token_ids"] = draw(st.sampled_from([None, []]))
    if draw(st.booleans()):
        begin["weight_version"] = draw(VERSIONS)
    complete = {
        "prompt_token_ids": prefix + more,
        "generated_token_ids": generated,
        "generated_logprobs": [draw(LOG_PROBS) for _ in generated],
        "extras": draw(EXTRAS),
    }
    if draw(st.booleans()):
        complete["attachments"] = draw(st.sampled_from([None, {}, {"media": [1, 2]}]))
    return {
        "admission": admission,
        "begin": begin,
        "provided": draw(VERSIONS),
        "complete": complete,
        "sink": "stores",
    }


@given(questions())
def test_a_good_call_is_staged_alike(gym: GymContract, question: dict[str, Any]) -> None:
    both = agree(ask_both(gym, "call", **question))
    assert both.ours["value"]["coords"]["disposition"] == "staged"
    assert both.ours["value"]["again"] == "CaptureError"
    ((_, keywords),) = both.ours["value"]["stored"]
    given_attachments = question["complete"].get("attachments")
    assert keywords == ({} if given_attachments is None else {"attachments": given_attachments})


@given(questions(), st.sampled_from(["raises", "refuses", "says nothing", "plain"]))
def test_a_sink_that_fails(gym: GymContract, question: dict[str, Any], sink: str) -> None:
    both = agree(ask_both(gym, "call", **{**question, "sink": sink}))
    attached = question["complete"].get("attachments") is not None
    staged = sink == "plain" and not attached
    coords = both.ours["value"]["coords"]
    assert coords["disposition"] == ("staged" if staged else "capture_failed")
    assert both.ours["value"]["again"] == "CaptureError"


ODD_ID = st.sampled_from([True, 1.0, -1, "1", None, [1], float("nan")])
ODD_LOG = st.sampled_from([0, True, "0.5", None, [0.5], float("nan"), float("inf"), 1e39])
ODD_EXTRAS = st.sampled_from(
    [[1], "x", 5, (), {"a": (1,)}, {"a": b"x"}, {"a": 2**63}, {"a": float("nan")}, {"a": "\ud800"}]
)


@given(questions(), st.data())
def test_a_call_that_cannot_be_built(
    gym: GymContract, question: dict[str, Any], data: st.DataObject
) -> None:
    complete = question["complete"]
    breaks = ["drop a log probability", "one more log probability", "extras", "prompt"]
    if complete["generated_token_ids"]:
        breaks += ["generated", "log probability"]
    if question["admission"]["mode"] == "token_in":
        breaks += ["prefix", "short prompt"]
    how = data.draw(st.sampled_from(breaks))
    prompt = complete["prompt_token_ids"]
    at = data.draw(st.integers(0, 10))
    match how:
        case "drop a log probability":
            complete["generated_token_ids"] = [*complete["generated_token_ids"], 1]
        case "one more log probability":
            complete["generated_logprobs"] = [*complete["generated_logprobs"], -0.5]
        case "extras":
            complete["extras"] = data.draw(ODD_EXTRAS)
        case "prompt":
            prompt = complete["prompt_token_ids"] = [*prompt]
            prompt[at % len(prompt)] = data.draw(ODD_ID)
        case "generated":
            complete["generated_token_ids"][at % len(complete["generated_token_ids"])] = data.draw(
                ODD_ID
            )
        case "log probability":
            complete["generated_logprobs"][at % len(complete["generated_logprobs"])] = data.draw(
                ODD_LOG
            )
        case "prefix":
            at %= question["admission"]["prev_len"]
            complete["prompt_token_ids"] = [*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]]
        case "short prompt":
            complete["prompt_token_ids"] = prompt[: question["admission"]["prev_len"] - 1]
    both = agree(ask_both(gym, "call", **question))
    assert both.ours["value"]["coords"]["disposition"] == "capture_failed"
    assert both.ours["value"]["stored"] == []
    assert both.ours["value"]["again"] == "CaptureError"


@given(questions())
def test_nothing_prompted_and_nothing_generated(gym: GymContract, question: dict[str, Any]) -> None:
    complete = question["complete"]
    complete |= {"generated_token_ids": [], "generated_logprobs": []}
    prev_len = question["admission"].get("prev_len", 0)
    complete["prompt_token_ids"] = complete["prompt_token_ids"][:prev_len]
    both = agree(ask_both(gym, "call", **question))
    assert both.ours["value"]["coords"]["disposition"] == "capture_failed"


CHILD = {"mode": "token_in", "parent_call_id": "p", "prev_len": 2, "parent_chain_hash": "ab" * 32}
CHAINED = {**CHILD, "staging_chain": ["k"]}
BOTH_WAYS = {**CHAINED, "required_prefix_token_ids": [5, 6]}
BAD_VERSIONS: list[Any] = [-1, True, 1.0, "1"]
BAD_ROOT_PREFIXES: list[Any] = [[1], [-1], [True], "", (), {}, 5]
BAD_PREFIXES: list[Any] = [
    *(None, [], [5], [5, 6, 7], [5, -1], [5, 6.0], [5, True], [5, "6"], (5, 6), "56"),
]
BEGINS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("StreamingUnsupportedError", {}, {"stream": True}),
    *[("CaptureError", {}, {"weight_version": bad}) for bad in BAD_VERSIONS],
    *[("CaptureError", {}, {"prefix_token_ids": bad}) for bad in BAD_ROOT_PREFIXES],
    *[("CaptureError", CHAINED, {"prefix_token_ids": bad}) for bad in BAD_PREFIXES],
    ("CaptureError", BOTH_WAYS, {"prefix_token_ids": [5, 7]}),
    ("CaptureError", {**BOTH_WAYS, "required_prefix_token_ids": [5]}, {"prefix_token_ids": [5, 6]}),
]


@pytest.mark.parametrize(("error", "admission", "begin"), BEGINS, ids=repr)
def test_a_caller_s_mistake_raises_alike(
    gym: GymContract, error: str, admission: dict[str, Any], begin: dict[str, Any]
) -> None:
    question = asked({"mode": "text", **admission}, begin)
    both = agree(ask_both(gym, "call", **question))
    assert both.ours["rejected"] == error


def asked(admission: dict[str, Any], begin: dict[str, Any], **change: Any) -> dict[str, Any]:
    complete = {
        "prompt_token_ids": [5, 6, 7],
        "generated_token_ids": [8],
        "generated_logprobs": [-0.5],
    }
    return {
        "admission": {"rollout_id": "r", "model_call_id": "c", **admission},
        "begin": begin,
        "provided": 7,
        "complete": {**complete, **change},
        "sink": "stores",
    }


@pytest.mark.parametrize("provided", [-1, True, 1.5, "1", None], ids=repr)
def test_a_provider_that_gives_no_version(gym: GymContract, provided: Any) -> None:
    both = agree(ask_both(gym, "call", **{**asked({"mode": "text"}, {}), "provided": provided}))
    assert both.ours["rejected"] == "CaptureError"


@pytest.mark.parametrize("version", [2**64, 2**70])
def test_a_version_beyond_64_bits_begins_and_fails(gym: GymContract, version: int) -> None:
    both = agree(ask_both(gym, "call", **asked({"mode": "text"}, {"weight_version": version})))
    assert both.ours["value"]["coords"]["disposition"] == "capture_failed"
    assert both.ours["value"]["coords"]["weight_version"] == version


@pytest.mark.parametrize(
    ("admission", "begin"),
    [
        ({**CHILD, "required_prefix_token_ids": [5, 6]}, {}),
        (CHAINED, {"prefix_token_ids": [5, 6]}),
        ({"mode": "text"}, {}),
    ],
)
def test_an_inline_prefix_is_used_unless_one_is_given(
    gym: GymContract, admission: dict[str, Any], begin: dict[str, Any]
) -> None:
    both = agree(ask_both(gym, "call", **asked(admission, begin)))
    assert both.ours["value"]["coords"]["disposition"] == "staged"


BIG = INT32_MAX + 1


@pytest.mark.parametrize("name", ["prompt_token_ids", "generated_token_ids"])
def test_an_id_beyond_int32_is_captured_there_and_fails_here(gym: GymContract, name: str) -> None:
    """A deliberate difference: our token columns are int32, so the call is answered uncaptured."""
    both = ask_both(gym, "call", **asked({"mode": "text"}, {}, **{name: [BIG]}))
    assert both.gym["value"]["coords"]["disposition"] == "staged"
    assert both.ours["value"]["coords"]["disposition"] == "capture_failed"
    fits = ask_both(gym, "call", **asked({"mode": "text"}, {}, **{name: [INT32_MAX]}))
    assert agree(fits).ours["value"]["coords"]["disposition"] == "staged"


@pytest.mark.parametrize(
    ("admission", "begin"),
    [
        ({**CHILD, "required_prefix_token_ids": [5, BIG]}, {}),
        (CHAINED, {"prefix_token_ids": [5, BIG]}),
    ],
)
def test_a_prefix_beyond_int32_is_refused_here(
    gym: GymContract, admission: dict[str, Any], begin: dict[str, Any]
) -> None:
    """The same difference, where the prefix is checked."""
    question = asked(admission, begin, prompt_token_ids=[5, BIG, 7])
    both = ask_both(gym, "call", **question)
    assert both.gym["value"]["coords"]["disposition"] == "staged"
    assert both.ours["rejected"] == "CaptureError"


@pytest.mark.parametrize("name", ["prompt_token_ids", "generated_token_ids", "generated_logprobs"])
def test_a_tuple_is_a_sequence_here(gym: GymContract, name: str) -> None:
    """A deliberate difference: arrays and any sequence are columns to us, lists alone to Gym."""
    good = asked({"mode": "text"}, {})
    change: dict[str, Any] = {name: tuple(good["complete"][name])}
    both = ask_both(gym, "call", **asked({"mode": "text"}, {}, **change))
    assert both.gym["value"]["coords"]["disposition"] == "capture_failed"
    staged = agree(ask_both(gym, "call", **good)).ours["value"]["coords"]
    assert both.ours["value"]["coords"] == staged
