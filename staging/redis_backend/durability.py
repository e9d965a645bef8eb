"""What a Redis server does with rows: asked once, when a store is opened."""

from __future__ import annotations

import logging
import re
from typing import Final

from tokenplane.schemas.errors import StoreError, UnsupportedStoreError
from tokenplane.staging.redis_backend.connection import RedisConnection
from tokenplane.staging.store_types import Durability

logger = logging.getLogger("tokenplane.staging")

OLDEST_SERVER: Final = (6, 2)
"""ZMSCORE and scripts that are replicated by effect."""
_ORDER: Final = {"none": 0, "process": 1, "power": 2}
_SETTINGS: Final = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "maxmemory",
    "maxmemory-policy",
)


def check_server(connection: RedisConnection, require: Durability) -> Durability:
    """What an acknowledged put survives on this server; less than ``power`` is logged.

    Raises:
        UnsupportedStoreError: too old, may evict rows, or less durable than ``require``.
    """
    info: bytes = connection.command("INFO", "server")
    match = re.search(rb"^redis_version:(\d+)\.(\d+)", info, re.MULTILINE)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_SERVER:
        raise UnsupportedStoreError(
            "the server is too old", expected=">= 6.2", got=match and match[0].decode()
        )
    settings = _settings(connection)
    policy = settings.get("maxmemory-policy", "noeviction")
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise UnsupportedStoreError(
            "the server evicts rows when its memory is full",
            expected="maxmemory-policy noeviction",
            got=policy,
        )
    durable = durability_of(settings)
    found = ", ".join(f"{name} {settings.get(name, 'unknown')}" for name in _SETTINGS[:3])
    if _ORDER[durable] < _ORDER[require]:
        raise UnsupportedStoreError(
            f"rows on this server survive less than {require!r}",
            expected="appendonly yes, appendfsync always",
            got=found,
        )
    if durable != "power":
        logger.warning("redis: acknowledged rows survive %s only (%s)", durable, found)
    return durable


def durability_of(settings: dict[str, str]) -> Durability:
    """Derived from the server's settings; unknown ones count as the worst.

    ``appendfsync no`` writes the log before it answers, so a killed server loses nothing.
    ``everysec`` may put even that write off while an earlier sync is still running.
    """
    if settings.get("appendonly") != "yes":
        return "none"
    if settings.get("appendfsync") == "always":
        # Otherwise nothing is synced while the log is being rewritten.
        return "power" if settings.get("no-appendfsync-on-rewrite") == "no" else "process"
    return "process" if settings.get("appendfsync") == "no" else "none"


def _settings(connection: RedisConnection) -> dict[str, str]:
    try:
        # One name per call: older servers take no more.
        replies = [connection.command("CONFIG", "GET", name) for name in _SETTINGS]
    except StoreError as exc:
        if exc.retryable:
            raise
        logger.warning("redis: the server does not show its configuration (%s)", exc)
        return {}
    pairs = [(reply[at], reply[at + 1]) for reply in replies for at in range(0, len(reply), 2)]
    return {name.decode(): value.decode() for name, value in pairs}
