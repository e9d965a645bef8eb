"""Reading a render by its literals and texts, where texts may hold the literals."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tokenplane.capture.splice.parts import IdSlot, Part, TextSlot, match_parts, match_whole

pieces = st.text(alphabet="ab \n", max_size=6)


@given(st.lists(pieces, min_size=1, max_size=4), st.data())
def test_whatever_was_put_together_is_read_again(texts: list[str], data: st.DataObject) -> None:
    glue = data.draw(st.lists(pieces, min_size=len(texts) + 1, max_size=len(texts) + 1))
    parts: list[Part] = []
    text = ""
    for number, want in enumerate(texts):
        parts += [glue[number], TextSlot(number)]
        forms = [want, want.strip(), json.dumps(want)[1:-1]]
        text += glue[number] + data.draw(st.sampled_from(forms))
    parts.append(glue[-1])
    text += glue[-1]
    assert match_whole(text, parts, texts, [], start=0) is not None
    assert match_parts(text, parts, texts, [], start=0) is not None


@given(pieces, pieces.filter(bool))
def test_more_or_less_than_the_parts_is_no_match(text: str, more: str) -> None:
    parts: list[Part] = ["<", TextSlot(0), ">"]
    assert match_whole(f"<{text}>{more}", parts, [text], [], start=0) is None
    assert match_whole(f"<{text}", parts, [text], [], start=0) is None
    assert match_whole(f"<{text}{more}x>", parts, [text], [], start=0) is None


def test_forms_are_named() -> None:
    parts: list[Part] = [TextSlot(0), "|", IdSlot(0)]
    for text, want, forms in (
        ("a|call_1", "a", frozenset()),
        ("a|call_1", " a\n", frozenset({"trimmed"})),
        ('\\"é|call_1', '"é', frozenset({"json_escaped"})),
        ("\\u003ca|call_1", "<a", frozenset({"json_escaped"})),
        ("a|call_2", "a", None),
        ("A|call_1", "a", None),
    ):
        assert match_whole(text, parts, [want], ["call_1"], start=0) == forms
