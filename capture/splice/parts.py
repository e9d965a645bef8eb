"""Text that a template prints, as literals with places for message texts and tool-call ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenplane.capture.splice.probes import Mark


@dataclass(frozen=True, slots=True)
class TextSlot:
    """The place of the text with this index."""

    index: int


@dataclass(frozen=True, slots=True)
class IdSlot:
    """The place of the tool-call id with this index."""

    index: int


type Part = str | TextSlot | IdSlot


def split_parts(text: str, marks: Sequence[Mark], *, start: int, end: int) -> list[Part]:
    """``text[start:end]`` cut at its marks; empty literals are left out."""
    parts: list[Part] = []
    at = start
    for m in marks:
        if m.start < start or m.end > end:
            continue
        if m.start > at:
            parts.append(text[at : m.start])
        parts.append(IdSlot(m.index) if m.kind == "id" else TextSlot(m.index))
        at = m.end
    if at < end:
        parts.append(text[at:end])
    return parts


def match_parts(
    text: str, parts: Sequence[Part], texts: Sequence[str], ids: Sequence[str], *, start: int
) -> tuple[int, frozenset[str]] | None:
    """Where ``parts`` end when they are read from ``text[start:]``, and how texts were printed.

    A text may stand as it is, trimmed, or JSON-escaped. None where they do not fit. Texts may hold
    what the template prints around them, so every place is tried.
    """
    return next(_matches(text, parts, texts, ids, start, 0), None)


def match_whole(
    text: str, parts: Sequence[Part], texts: Sequence[str], ids: Sequence[str], *, start: int
) -> frozenset[str] | None:
    """How texts were printed, if ``parts`` make up exactly ``text[start:]``; else None."""
    for end, notes in _matches(text, parts, texts, ids, start, 0):
        if end == len(text):
            return notes
    return None


def printed_forms(want: str) -> Iterator[tuple[str, str]]:
    """What a template may print for a text, each once, with the name of the form; likely first."""
    seen = {want}
    yield want, "as_is"
    trims = (want, want.strip(), want.rstrip(), want.lstrip())
    for trimmed in trims:
        if trimmed not in seen:
            seen.add(trimmed)
            yield trimmed, "trimmed"
    for trimmed in trims:
        for ascii_only in (False, True):
            quoted = json.dumps(trimmed, ensure_ascii=ascii_only)[1:-1]
            for escaped in (quoted, _html_safe(quoted)):
                if escaped not in seen:
                    seen.add(escaped)
                    yield escaped, "json_escaped"


def _html_safe(quoted: str) -> str:
    """jinja2's own ``tojson`` writes these four as escapes."""
    for sign in "<>&'":
        quoted = quoted.replace(sign, f"\\u{ord(sign):04x}")
    return quoted


def _matches(
    text: str,
    parts: Sequence[Part],
    texts: Sequence[str],
    ids: Sequence[str],
    at: int,
    number: int,
) -> Iterator[tuple[int, frozenset[str]]]:
    """Every end that ``parts[number:]`` can have from ``at``, depth first."""
    if number == len(parts):
        yield at, frozenset()
        return
    part = parts[number]
    if isinstance(part, TextSlot):
        for form, name in printed_forms(texts[part.index]):
            if text.startswith(form, at):
                note = frozenset() if name == "as_is" else frozenset({name})
                for end, notes in _matches(text, parts, texts, ids, at + len(form), number + 1):
                    yield end, notes | note
        return
    literal = ids[part.index] if isinstance(part, IdSlot) else part
    if text.startswith(literal, at):
        yield from _matches(text, parts, texts, ids, at + len(literal), number + 1)
