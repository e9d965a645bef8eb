"""The renderer over a tokenizer: exactly apply_chat_template, and messages that fit a template."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from transformers import AutoTokenizer

from tests.capture.splice_renderers import TextRenderer
from tests.tokenizers.splice_rollout import TERMINATORS, messy_text
from tokenplane.capture.splice.shapes import TOOLS
from tokenplane.engine_adapter.chat.renderer import (
    TokenizerChatRenderer,
    open_renderer,
    read_terminator_ids,
)
from tokenplane.schemas.errors import ConfigError

type RendererOf = Callable[[str], TokenizerChatRenderer]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    called = {"id": "callaaaa1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3.1"])
@settings(max_examples=30)
@given(text=messy_text)
def test_it_renders_and_encodes_as_the_tokenizer_does(
    name: str, renderer_of: RendererOf, tokenizers_folder: Path, text: str
) -> None:
    renderer, tokenizer = renderer_of(name), _tokenizer(tokenizers_folder / name)
    messages = [{"role": "user", "content": text}]
    rendered = renderer.render(messages, None, add_generation_prompt=True, template_kwargs=None)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    np.testing.assert_array_equal(renderer.encode(rendered), ids)
    assert renderer.encode(rendered).dtype == np.int32


_loaded: dict[Path, Any] = {}


def _tokenizer(folder: Path) -> Any:
    if folder not in _loaded:
        _loaded[folder] = AutoTokenizer.from_pretrained(folder)
    return _loaded[folder]


def test_template_kwargs_and_tools_reach_the_template(renderer_of: RendererOf) -> None:
    renderer = renderer_of("qwen3")
    messages = [{"role": "user", "content": "Hi"}]

    def render(tools: Any, kwargs: Any) -> str:
        return renderer.render(messages, tools, add_generation_prompt=True, template_kwargs=kwargs)

    assert "get_weather" in render(TOOLS, None)
    assert render(None, {"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    assert render(None, None).endswith("<|im_start|>assistant\n")


def test_arguments_in_the_form_that_a_template_prints_as_json(renderer_of: RendererOf) -> None:
    expected = '{"name": "look", "arguments": {"city": "Par\\"is"}}'
    for arguments in ({"city": 'Par"is'}, json.dumps({"city": 'Par"is'})):
        text = renderer_of("qwen3").render(
            [{"role": "user", "content": "Go."}, call(arguments)],
            TOOLS,
            add_generation_prompt=False,
            template_kwargs=None,
        )
        assert expected in text


@pytest.mark.parametrize(
    ("printing", "needs", "printed"),
    [
        ("{{ arguments | tojson }}", "mapping", {'{"a": 1}': '{"a": 1}', "no JSON": "{}"}),
        ("{{ '' + arguments }}", "string", {'{"a": 1}': '{"a": 1}', "no JSON": "no JSON"}),
        (
            "{{ arguments if arguments is string else arguments | tojson }}",
            "either",
            {'{"a": 1}': '{"a": 1}', "no JSON": "no JSON", "[1]": "[1]", "": "{}"},
        ),
        (
            "{% for k, v in arguments.items() %}{{ k }}={{ v }};{% endfor %}",
            "mapping",
            {'{"a": 1}': "a=1;", "[1]": ""},
        ),
    ],
)
def test_what_a_template_needs_is_found_by_trying(
    printing: str, needs: str, printed: dict[str, str]
) -> None:
    renderer = TextRenderer(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set arguments = c.function.arguments %}[" + printing + "]{% endfor %}{% endfor %}"
    )
    assert renderer.needs.arguments == needs
    for arguments, want in printed.items():
        message = {**call(arguments), "content": ""}
        text = renderer.render([message], None, add_generation_prompt=False, template_kwargs=None)
        assert text == f"[{want}]"


def test_content_that_a_template_does_not_read() -> None:
    plain = TextRenderer("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    reading = TextRenderer(
        "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
        "{% for b in m.content or [] %}<{{ b.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    message = {"role": "user", "content": blocks}
    none = {**call({}), "content": None}
    given_ = {"add_generation_prompt": False, "template_kwargs": None}
    assert plain.render([message, none], None, **given_) == "<ab><>"  # type: ignore[arg-type]
    assert reading.render([message, none], None, **given_) == "<a><b>"  # type: ignore[arg-type]
    assert message["content"] is blocks
    assert none["content"] is None


def test_terminators_come_from_the_tokenizer_and_the_generation_config(
    tokenizers_folder: Path, tmp_path: Path
) -> None:
    for file in (tokenizers_folder / "smollm2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert open_renderer(tmp_path).terminator_ids == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2, true]}')
    assert open_renderer(tmp_path, ["<repo_name>"]).terminator_ids == {0, 2, 3}
    with pytest.raises(ConfigError, match="no such token"):
        open_renderer(tmp_path, ["<|nothing|>"])
    with pytest.raises(ConfigError, match="no tokenizer"):
        open_renderer(tmp_path / "nowhere")
    assert read_terminator_ids(_tokenizer(tokenizers_folder / "qwen3"), None) == {151645}


def test_a_tokenizer_without_a_template_is_refused(tokenizers_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizers_folder / "smollm2")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        TokenizerChatRenderer(tokenizer)


def test_special_tokens_and_texts(renderer_of: RendererOf) -> None:
    renderer = renderer_of("qwen3")
    end = int(renderer.encode(TERMINATORS["qwen3"][0])[0])
    assert end in renderer.special_token_ids
    assert renderer.token_text(end) == "<|im_end|>"
    think = int(renderer.encode("<think>")[0])
    assert renderer.token_text(think) == "<think>"
    assert think not in renderer.special_token_ids
    assert "".join(map(renderer.token_text, renderer.encode(" a b\n\n").tolist())) == " a b\n\n"


def test_fingerprints_tell_templates_and_vocabularies_apart(renderer_of: RendererOf) -> None:
    renderers = [renderer_of(name) for name in ("smollm2", "qwen3", "llama3.1")]
    assert len({r.template_fingerprint for r in renderers}) == 3
    assert len({r.tokenizer_fingerprint for r in renderers}) == 3
    assert all(len(r.template_fingerprint) == 64 for r in renderers)


def test_several_threads_may_use_one_renderer(renderer_of: RendererOf) -> None:
    renderer = renderer_of("qwen3")
    texts = [f"text {n} " * 50 for n in range(64)]
    alone = [renderer.encode(text).tolist() for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: renderer.encode(text).tolist(), texts))
    assert together == alone
