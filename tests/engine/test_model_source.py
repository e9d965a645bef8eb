"""``load_model`` and the tiny models: identity, reproducibility, tokenizer, template."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.engine_adapter.models.identity import fingerprint_tokenizer, fingerprint_weights
from tokenplane.engine_adapter.models.megatron_process import quiet_imports, require_process
from tokenplane.engine_adapter.models.megatron_tiny import tiny_model, tiny_tokenizer
from tokenplane.engine_adapter.models.source import load_model
from tokenplane.schemas.errors import ConfigError

pytestmark = pytest.mark.engine

TOKENIZER = tiny_tokenizer()


def test_unknown_specs_name_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tiny or tiny-moe or smollm2.*gpt5"):
        load_model("gpt5")


@pytest.mark.parametrize("spec", ["tiny", "tiny-moe"])
def test_loading_twice_gives_equal_models_of_their_own(spec: str) -> None:
    one, two = load_model(spec), load_model(spec)
    assert one.info == two.info
    assert one.info.vocab_size == len(one.tokenizer)
    assert one.info.eos_token_ids == (2, 0)
    assert one.generation_config["eos_token_id"] == [2, 0]
    with torch.no_grad():
        next(one.model.parameters()).add_(1)
    assert fingerprint_weights(one.model) != fingerprint_weights(two.model)


def test_the_same_identity_in_another_process() -> None:
    code = (
        "from tokenplane.engine_adapter.models.source import load_model\n"
        "info = load_model('tiny').info\n"
        "print(info.model_fingerprint, info.tokenizer_fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    info = load_model("tiny").info
    assert run.stdout.split() == [info.model_fingerprint, info.tokenizer_fingerprint]
    # A start prints nothing of its own: standard output is data, and remarks would hide errors.
    assert run.stderr == ""


def test_fingerprints_tell_models_apart() -> None:
    prints = {fingerprint_weights(tiny_model(300, seed=seed)) for seed in (0, 1)}
    prints |= {fingerprint_weights(tiny_model(301)), fingerprint_weights(tiny_model(300, moe=True))}
    assert len(prints) == 4
    other = tiny_tokenizer()
    assert fingerprint_tokenizer(other) == fingerprint_tokenizer(TOKENIZER)
    other.add_tokens(["novel"])
    assert fingerprint_tokenizer(other) != fingerprint_tokenizer(TOKENIZER)


@given(st.text(max_size=60))
def test_tokenizer_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    decoded = TOKENIZER.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert decoded == text
    assert all(0 <= token < len(TOKENIZER) for token in ids)


def test_merges_make_encoding_ambiguous() -> None:
    """Sampled ids need not be what their text encodes to: the case that capture is about."""
    spelled = [token for letter in " the" for token in TOKENIZER.encode(letter)]
    merged = TOKENIZER.encode(" the")
    assert len(merged) == 1 < len(spelled)
    assert TOKENIZER.decode(spelled) == TOKENIZER.decode(merged)


def test_chat_template() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
            ],
        },
        {"role": "tool", "content": "a tree"},
    ]
    plain = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\na tree<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tools = [{"type": "function", "function": {"name": "look"}}]
    with_tools = TOKENIZER.apply_chat_template(messages[1:], tools=tools, tokenize=False)
    assert '"name": "look"' in with_tools.split("<|im_start|>user")[0]
    assert not with_tools.endswith("assistant\n")
    ids = TOKENIZER.encode(plain)
    assert ids.count(1) == 5
    assert ids.count(2) == 4


def test_a_process_is_prepared_once() -> None:
    require_process()
    group = torch.distributed.group.WORLD
    require_process()
    assert torch.distributed.group.WORLD is group
    assert torch.distributed.get_world_size() == 1


def test_quiet_imports_lets_errors_through() -> None:
    with quiet_imports():
        warnings.warn("a remark about a missing accelerator", stacklevel=1)
        assert logging.getLogger("megatron.core").isEnabledFor(logging.ERROR)
        assert not logging.getLogger("megatron.core").isEnabledFor(logging.WARNING)
    with pytest.warns(UserWarning, match="ours"):
        warnings.warn("ours", UserWarning, stacklevel=1)
    with pytest.raises(ZeroDivisionError), quiet_imports():
        _ = 1 // 0
