"""The two checks that end every splice."""

from __future__ import annotations

import numpy as np

from tokenplane.capture.splice.codes import SpliceCode, splice_error
from tokenplane.schemas.tokens import Int32Array


def check_spliced(prompt: Int32Array, *, prefix: Int32Array, after_boundary: Int32Array) -> None:
    """``prompt`` is exactly ``prefix``, then each token of ``after_boundary`` once, then nothing.

    Raises: SpliceError ``prefix_not_kept`` or ``suffix_incomplete``.
    """
    kept = len(prefix)
    if not np.array_equal(prompt[:kept], prefix):
        raise splice_error(SpliceCode.PREFIX_NOT_KEPT)
    if not np.array_equal(prompt[kept:], after_boundary):
        raise splice_error(
            SpliceCode.SUFFIX_INCOMPLETE,
            expected=f"{len(after_boundary)} tokens after the prefix",
            got=f"{len(prompt) - kept}",
        )
