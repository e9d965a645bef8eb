"""A tiny random Megatron model and its tokenizer: real parts, small enough for every test.

The weights come from a seeded generator of their own, so the same spec gives the same model in
every process. The tokenizer is byte-level BPE with a few merges: every text can be encoded, and
sampled ids need not be the ids that their text encodes to.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tokenplane.engine_adapter.models.megatron_build import GptShape, build_gpt

MAX_SEQUENCE_LENGTH = 8192
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
_MERGES = """
t h|th e|Ġ t|Ġ a|Ġ the|i n|a n|an d|Ġa nd|o n|e r|r e|o r|e n|e d|i s|i t|in g|a t|o u|
s t|l l|Ġ i|Ġ s|Ġ w|u s|us er|Ġ o|o m|a l|l e|s e|v e|m e|a r|a s|s y|st e|ste m|sy stem|
as s|is t|an t|ass ist|assist ant|t o|o l|to ol|Ġ {|" :|: Ġ|n a|na me|o w|c al|cal l|Ġ in|
Ġ to|Ġ is|Ġ of|o f|e s|r o|c h|w h|h a|t i|ti on|l y|i g|ig ht|c e|n e|d e|u r|Ġy ou|y ou
"""
_CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\nTo call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' -}}
{%- elif system -%}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function or call -%}
{{- '<tool_call>{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
{{- (f.arguments if f.arguments is string else (f.arguments | tojson)) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in memory: 3 special tokens, 256 bytes, some merges; a ChatML template."""
    vocab = {token: index for index, token in enumerate(_SPECIAL)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    for pair in "".join(_MERGES.split("\n")).strip("|").split("|"):
        left, right = pair.split(" ")
        if left in vocab and right in vocab and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_SEQUENCE_LENGTH,
    )


def tiny_model(vocab_size: int, *, moe: bool = False, seed: int = 0) -> torch.nn.Module:
    """A GPTModel of 2 layers and hidden size 64 with 4 heads in 2 groups, float32, untied.

    ``moe``: 4 experts per layer, 2 per token, with routing replay.
    """
    shape = GptShape(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=96 if moe else 128,
        layernorm_epsilon=1e-5,
        vocab_size=vocab_size,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        rotary_base=10000,
        tied_embeddings=False,
        num_experts=4 if moe else None,
    )
    model = build_gpt(shape)
    _fill(model, seed)
    return model


def _fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights, large enough that the model prefers some tokens clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif "embedding" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5)
