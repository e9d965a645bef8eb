"""``open_store``: from a URL to an open store."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module

from tokenplane.schemas.errors import UnsupportedStoreError
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_url import parse_store_url, shown_url

BACKENDS = {
    "memory": "tokenplane.staging.memory_backend.store:open_memory_store",
    "file": "tokenplane.staging.file_backend.store:open_file_store",
    "redis": "tokenplane.staging.redis_backend.store:open_redis_store",
    "rediss": "tokenplane.staging.redis_backend.store:open_redis_store",
    "tq": "tokenplane.staging.tq_backend.opening:open_tq_store",
}
"""URL scheme to ``module:function``; the function takes a ``StoreUrl`` and ``clock``.

A module is imported when its scheme is first used.
"""
EXTRAS = {"redis": "redis", "rediss": "redis", "tq": "ray"}
"""URL scheme to the extra of this package that installs its library."""


def open_store(url: str, *, clock: Callable[[], float] = time.time) -> StagingStore:
    """The store behind ``url``, created if it is not there yet.

    ``memory:`` gives a new private store each time. ``file:///abs/dir``, ``file:rel/dir`` and a
    plain path open a directory. ``redis://``, ``rediss://`` and ``tq://`` need their extra.

    Args:
        clock: Unix seconds, for row ages and leases.

    Raises:
        UnsupportedStoreError: an unknown scheme, a missing library, or a store of another format.
        ConfigError: an unknown or malformed option in the URL.
        StoreUnavailableError: the server or directory cannot be reached.
    """
    parsed = parse_store_url(url)
    scheme = parsed.scheme or "file"
    if scheme not in BACKENDS:
        raise UnsupportedStoreError(
            "unknown store URL",
            expected=f"one of {', '.join(f'{s}:' for s in BACKENDS)}",
            got=shown_url(url),
        )
    if not parsed.scheme and url in BACKENDS:
        # A colon forgotten: a directory of that name would be made instead, and kept.
        raise UnsupportedStoreError(
            "a kind of store without its colon",
            expected=f"{url}: for the kind, ./{url} for a directory",
            got=url,
        )
    module, _, function = BACKENDS[scheme].partition(":")
    try:
        opener = getattr(import_module(module), function)
    except ModuleNotFoundError as exc:
        extra = EXTRAS.get(scheme)
        hint = f"install tokenplane[{extra}]" if extra else "the installation is incomplete"
        raise UnsupportedStoreError(
            f"{scheme}: needs the module {exc.name}, {hint}", got=shown_url(url)
        ) from exc
    store: StagingStore = opener(parsed, clock=clock)
    return store
