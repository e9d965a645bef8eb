"""The ids of a suffix, encoded in the place where it stands."""

from __future__ import annotations

from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.capture.splice.renderer import ChatTemplateRenderer
from tokenplane.schemas.tokens import Int32Array

_ANCHOR = "x"
"""Stands for the turn's own text: SentencePiece would put a space before the first piece."""


def encode_tail(renderer: ChatTemplateRenderer, text: str, terminator_id: int) -> Int32Array:
    """int32[T]: the ids of ``text``, which starts with a terminator; the first one is its id.

    Raises: SpliceError ``terminator_not_one_token`` where that does not stand apart.
    """
    anchor = renderer.encode(_ANCHOR)
    ids = renderer.encode(_ANCHOR + text)
    at = len(anchor)
    if ids[:at].tolist() != anchor.tolist() or len(ids) <= at or int(ids[at]) != terminator_id:
        raise splice_error(
            SpliceCode.TERMINATOR_NOT_ONE_TOKEN,
            expected=terminator_id,
            got=ids[: at + 3].tolist(),
        )
    return ids[at:]
