"""The prompt preparer: which prompts pass, which are spliced, which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.capture.rollouts import Call, RolloutMaker
from tokenplane.capture.hook_types import ADMISSION_KEY, PREFIX_KEY, PreparedPrefix
from tokenplane.capture.prompt_preparer import TQMegatronPromptPreparer
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import InvalidRecordError, PrefixError
from tokenplane.schemas.wire import CaptureAdmission
from tokenplane.staging import TokenSink, TokenSource, open_store

EOS = 2000


class Rig:
    def __init__(self) -> None:
        store = open_store("memory:")
        self.maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store)))
        self.call: Call = self.maker.stage()[1]
        self.preparer = TQMegatronPromptPreparer(TokenSource(store))

    def params(self, **more: Any) -> dict[str, Any]:
        return {ADMISSION_KEY: self.maker.admission(self.call).model_dump(), **more}


def test_ordinary_and_text_prompts_pass_unchanged() -> None:
    rig = Rig()
    for params in (None, {}, {"x": 1}):
        result = rig.preparer.prepare_prompt("hello", offload_params=params)
        assert (result.prompt, result.offload_params) == ("hello", params)
    text = CaptureAdmission(rollout_id="r", model_call_id="c", mode="text").model_dump()
    result = rig.preparer.prepare_prompt([1, 2], offload_params={ADMISSION_KEY: text})
    assert result.prompt == [1, 2]


def test_a_prompt_that_continues_exactly_is_taken_as_it_is() -> None:
    rig = Rig()
    prompt = [*rig.call.tokens.tolist(), 7, 8]
    result = rig.preparer.prepare_prompt(prompt, offload_params=rig.params())
    assert result.prompt.tolist() == prompt
    assert result.offload_params is not None
    prepared = result.offload_params[PREFIX_KEY]
    assert isinstance(prepared, PreparedPrefix)
    assert prepared.prefix.token_ids.tolist() == rig.call.tokens.tolist()
    assert prepared.notes == ("already_prefixed",)


def test_the_token_only_splice() -> None:
    rig = Rig()
    staged = rig.call.tokens.tolist()
    # The template renders the history with other ids (a BPE drift) and its own terminator.
    template_prefix = [1, 5, 5, 5, 9, EOS]
    render = [*template_prefix, 10, 11, EOS, 12]
    result = rig.preparer.prepare_prompt(
        render,
        offload_params=rig.params(template_prefix_token_ids=template_prefix, eos_token_id=EOS),
    )
    assert result.prompt.tolist() == [*staged, EOS, 10, 11, EOS, 12]


@pytest.mark.parametrize(
    ("prompt", "more", "code"),
    [
        ([1, 2, 3], {}, "prefix_no_splice_inputs"),
        ("text", {}, "prefix_prompt_type"),
        ([1, EOS, 3], {"template_prefix_token_ids": [1, EOS]}, "prefix_no_splice_inputs"),
    ],
)
def test_what_cannot_be_spliced_is_refused_with_a_code(prompt: Any, more: Any, code: str) -> None:
    rig = Rig()
    with pytest.raises(PrefixError) as caught:
        rig.preparer.prepare_prompt(prompt, offload_params=rig.params(**more))
    assert caught.value.code == code


def test_a_malformed_admission_is_refused() -> None:
    with pytest.raises(InvalidRecordError):
        Rig().preparer.prepare_prompt([1], offload_params={ADMISSION_KEY: {"mode": "token_in"}})


def test_arrays_are_prompts_too() -> None:
    rig = Rig()
    prompt = np.concatenate([rig.call.tokens, [3]]).astype(np.int64)
    result = rig.preparer.prepare_prompt(prompt, offload_params=rig.params())
    assert result.prompt.dtype == np.int32
