"""From a ``tq:`` URL to an open store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from tokenplane.schemas.errors import ConfigError, UnsupportedStoreError
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_url import (
    StoreUrl,
    one_of,
    parse_store_url,
    positive_int,
    positive_seconds,
    seconds,
    shown_url,
)
from tokenplane.staging.tq_backend.options import QueueOptions
from tokenplane.staging.tq_backend.store import TransferQueueStore

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink

_OF_JOURNAL: Final = ("max_bytes", "full_wait_s")


def open_tq_store(url: StoreUrl, *, clock: Callable[[], float]) -> TransferQueueStore:
    """The store of ``tq://CLUSTER?journal=STORE``.

    CLUSTER is ``local`` (start a Ray here), ``auto`` or ``host:port``. Options: ``journal`` (a
    directory or store URL; needed), ``max_bytes`` and ``full_wait_s`` (of the journal),
    ``namespace``, ``units``, ``start`` (yes or no), ``deadline_s``, ``connect_s``.
    """
    options = url.options(
        journal=str,
        max_bytes=positive_int,
        full_wait_s=seconds,
        namespace=str,
        units=positive_int,
        start=one_of("yes", "no"),
        deadline_s=positive_seconds,
        connect_s=seconds,
    )
    address = url.rest.removeprefix("//").rstrip("/")
    if not address or not options.get("journal"):
        raise ConfigError(
            "a tq: URL names a cluster and a journal",
            expected="tq://local|auto|host:port?journal=DIRECTORY or store URL",
            got=shown_url(url.text),
        )
    if parse_store_url(options["journal"]).scheme == "tq":
        raise ConfigError(
            "a journal is no queue itself",
            expected="a directory, or a file: or redis: URL",
            got=shown_url(url.text),
        )
    for module in ("ray", "transfer_queue"):
        if find_spec(module) is None:
            raise UnsupportedStoreError(
                f"tq: needs the module {module}, install tokenplane[ray]", got=shown_url(url.text)
            )
    given = {name: options[name] for name in ("units", "deadline_s") if name in options}
    queue = QueueOptions(
        address=address,
        partition=f"tokenplane.{options.get('namespace', 'default')}",
        start=options.get("start", "yes") == "yes",
        **given,
    )
    journal = open_store(_journal_url(options), clock=clock)
    wait = {"connect_s": options["connect_s"]} if "connect_s" in options else {}
    return TransferQueueStore(url.text, journal, partial(_connect, queue), **wait)


def _connect(options: QueueOptions) -> QueueLink:
    # Ray and torch take many seconds to import: nobody waits for them who need not.
    from tokenplane.staging.tq_backend.runtime import connect

    return connect(options)


def _journal_url(options: dict[str, Any]) -> str:
    text: str = options["journal"]
    if ":" not in text:
        text = Path(text).absolute().as_uri()
    given: dict[str, object] = {name: options[name] for name in _OF_JOURNAL if name in options}
    more = urlencode(given)
    if not more:
        return text
    return f"{text}{'&' if '?' in text else '?'}{more}"
