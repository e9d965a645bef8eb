"""One Redis server (or the cluster node that holds our slot): commands, deadlines and errors.

Every error of redis-py becomes ours here, and nowhere else.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from tokenplane.schemas.errors import (
    ConfigError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from tokenplane.staging.redis_backend.scripts import Script
from tokenplane.staging.store_url import shown_url

FIRST_WAIT_S: Final = 0.01
LONGEST_WAIT_S: Final = 0.5
ONE_SEND_BYTES: Final = 1 << 20
_FULL = re.compile(r"no space left|maxmemory|\bENOSPC\b", re.IGNORECASE)
# What a server says that is on its way: starting, failing over, moving slots.
_PASSING = (
    RedisConnectionError,
    ReadOnlyError,
    AskError,
    TryAgainError,
    ClusterDownError,
)
_PASSING_WORDS = ("LOADING", "MASTERDOWN", "BUSY", "NOREPLICAS")


class RedisConnection:
    """Runs commands and scripts. Thread-safe; connections are pooled and survive a fork.

    A command that meets a lost connection or a starting server is sent again until ``timeout_s``
    is over, so everything sent through here must be safe to send twice. Neither a lost packet nor
    a hung server holds a call longer than about twice ``timeout_s``.
    """

    def __init__(self, url: str, *, timeout_s: float, tls: dict[str, str]) -> None:
        self._timeout_s = timeout_s
        # redis-py's own retries would multiply the deadline: the loop below is the only one.
        self._options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "socket_keepalive": True,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": 10_000,
            "protocol": 2,
        }
        target = url if not tls else f"{url}?{urlencode(tls)}"
        try:
            self._seed = redis.ConnectionPool.from_url(target, **self._options)
        except ValueError as exc:
            raise ConfigError("not a Redis URL", got=shown_url(url)) from exc
        self._pool = self._seed
        self._others: dict[tuple[str, int], redis.ConnectionPool] = {}
        self._idle: dict[redis.ConnectionPool, list[Any]] = {}
        self._pid = os.getpid()
        self._closed = False

    def command(self, *parts: bytes | str | int) -> Any:
        """One command's reply; bulk strings are bytes.

        Raises:
            StoreError: see ``to_store_error``; also every other method.
        """
        return self._run(lambda connection: _one(connection, parts))

    def script(self, script: Script, keys: Sequence[bytes], *args: bytes | str | int) -> Any:
        """The reply of a script, which is loaded when the server does not know it."""

        def run(connection: Any) -> Any:
            try:
                return _one(connection, ("EVALSHA", script.sha1, len(keys), *keys, *args))
            except NoScriptError:
                _one(connection, ("SCRIPT", "LOAD", script.text))
                return _one(connection, ("EVALSHA", script.sha1, len(keys), *keys, *args))

        return self._run(run)

    def _run(self, job: Callable[[Any], Any]) -> Any:
        deadline = time.monotonic() + self._timeout_s
        wait = FIRST_WAIT_S
        while True:
            self.check_open()
            try:
                return self._once(job)
            except MovedError as exc:
                if time.monotonic() > deadline:
                    raise StoreUnavailableError("the hash slot keeps moving", got=exc) from exc
                self._pool = self._pool_of(exc)
            except RedisError as exc:
                if not _is_passing(exc) or time.monotonic() + wait > deadline:
                    raise to_store_error(exc) from exc
                self._drop_idle()
                self._pool = self._seed
                time.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _once(self, job: Callable[[Any], Any]) -> Any:
        # The pool probes every connection that it hands out, which costs as much as a command.
        # Here a dead one is noticed by the command, which is sent again.
        pool = self._pool
        if self._pid != os.getpid():
            self._idle, self._pid = {}, os.getpid()
        idle = self._idle.setdefault(pool, [])
        try:
            connection: Any = idle.pop()
        except IndexError:
            connection = pool.get_connection()
        try:
            return job(connection)
        except ResponseError:
            raise
        except BaseException:
            # A reply may still be on its way: nobody else may read it.
            connection.disconnect()
            raise
        finally:
            idle.append(connection)

    def _drop_idle(self) -> None:
        """What has happened to one connection may have happened to all."""
        for idle in list(self._idle.values()):
            dropped = []
            with suppress(IndexError):
                while True:
                    dropped.append(idle.pop())  # nobody else has it now
            for connection in dropped:
                connection.disconnect()
            idle.extend(dropped)

    def _pool_of(self, moved: MovedError) -> redis.ConnectionPool:
        place = (moved.host, moved.port)
        if place not in self._others:
            options = {**self._seed.connection_kwargs, "host": moved.host, "port": moved.port}
            self._others[place] = redis.ConnectionPool(
                connection_class=self._seed.connection_class, **options
            )
        return self._others[place]

    def check_open(self) -> None:
        """Raises:
        StoreClosedError: ``close`` was called.
        """
        if self._closed:
            raise StoreClosedError("the store was closed")

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        for pool in (self._seed, *self._others.values()):
            pool.disconnect()


def _one(connection: Any, parts: Sequence[bytes | str | int]) -> Any:
    connection.send_packed_command(_packed(parts))
    return connection.read_response(disable_decoding=True)


_LENGTHS: Final = [b"$%d\r\n" % length for length in range(256)]


def _packed(parts: Sequence[bytes | str | int]) -> list[bytes]:
    """The command as the protocol has it. A row is one write: the server wakes once for it."""
    pieces = [b"*%d\r\n" % len(parts)]
    size = 0
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        length = len(data)
        pieces += (_LENGTHS[length] if length < 256 else b"$%d\r\n" % length, data, b"\r\n")
        size += length
    return pieces if size > ONE_SEND_BYTES else [b"".join(pieces)]


def _is_passing(error: RedisError) -> bool:
    if isinstance(error, RedisTimeoutError | AuthenticationError):
        return False
    if isinstance(error, _PASSING):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING_WORDS)


def to_store_error(error: RedisError) -> StoreError:
    """Our error for one of redis-py."""
    got = f"{type(error).__name__}: {error}"
    if isinstance(error, RedisTimeoutError):
        return StoreTimeoutError("the server did not answer in time", got=got)
    if isinstance(error, OutOfMemoryError) or _FULL.search(str(error)):
        return StoreFullError("the server has no room", got=got)
    if isinstance(error, AuthenticationError | NoPermissionError):
        return StoreError("the server refuses us", got=got)
    if isinstance(error, ReadOnlyError):
        return StoreUnavailableError(
            "the server is a replica and takes no writes", expected="the primary", got=got
        )
    if _is_passing(error) or str(error).startswith("MISCONF"):
        return StoreUnavailableError("the server does not answer", got=got)
    return StoreError("the server refused", got=got)
