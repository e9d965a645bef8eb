"""A begun call: its admission, its proven prefix, and that it completes once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.errors import CaptureError, TokenplaneError
from tokenplane.schemas.tokens import Int32Array, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission

EMPTY_IDS = to_token_ids([])


@dataclass(slots=True)
class ActiveCall:
    """A begun call; it completes exactly once."""

    admission: CaptureAdmission
    prefix_token_ids: Int32Array = field(repr=False)
    """int32[prev_len], the exact sequence that the prompt must start with."""
    weight_version: int
    _claimed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def claim(self) -> None:
        """Flip to completed.

        Raises:
            CaptureError: it was completed before (code ``already_completed``).
        """
        with self._lock:
            if self._claimed:
                raise CaptureError(
                    "the call was completed before",
                    code="already_completed",
                    key=self.admission.model_call_id,
                )
            self._claimed = True


def checked_prefix(
    admission: CaptureAdmission, given: list[int] | NDArray[np.integer] | None
) -> Int32Array:
    """The prefix array that the rules of CONTRACT section 6 allow for this admission."""
    prefix: Int32Array | None = None
    if given is not None:
        if not isinstance(given, (list, np.ndarray)):
            raise CaptureError(
                "prefix_token_ids must be a list or an array", got=type(given).__name__
            )
        try:
            prefix = to_token_ids(given, name="prefix_token_ids")
        except ValueError as exc:
            raise CaptureError(str(exc), code=code_of(exc, "capture_error")) from exc
    if admission.mode == "text":
        if prefix is not None and len(prefix):
            raise CaptureError("a text call has no prefix", got=f"{len(prefix)} tokens")
        return EMPTY_IDS
    inline = admission.required_prefix_token_ids
    if prefix is None:
        if not inline:
            raise CaptureError("a token_in call needs its prefix", expected=admission.prev_len)
        try:
            return to_token_ids(inline, name="required_prefix_token_ids")
        except ValueError as exc:
            raise CaptureError(str(exc), code=code_of(exc, "capture_error")) from exc
    if len(prefix) != admission.prev_len:
        raise CaptureError("prefix length", expected=admission.prev_len, got=len(prefix))
    if inline and prefix.tolist() != inline:
        raise CaptureError("the given prefix differs from the admission's inline prefix")
    return prefix


def code_of(error: BaseException, default: str) -> str:
    """The stable code of one of our errors, else ``default``."""
    return error.code if isinstance(error, TokenplaneError) else default
