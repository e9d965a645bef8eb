"""Makes a TransferQueue hold a journal's rows: after a loss, a restart, or removals."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError, MissingRowError
from tokenplane.staging.row_packing import pack_row
from tokenplane.staging.store import StagingStore
from tokenplane.staging.tq_backend.payload import (
    Entry,
    blob_entry,
    blob_hash,
    blob_name,
    parse_row_name,
    row_entry,
    row_name,
)

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink

logger = logging.getLogger("tokenplane.staging")

ROWS_PER_BATCH: Final = 32


def replay(
    journal: StagingStore, origin: bytes, link: QueueLink, litter: Iterable[str] = ()
) -> tuple[int, int]:
    """Make the queue hold the journal's rows; (rows published, names cleared).

    Args:
        litter: names that got a place in the queue and then no row; cleared unless they are wanted.
    """
    tag = origin.hex()
    listed = link.names()
    known = {name for name, owner in listed.items() if owner == tag}
    published = 0
    for partition in journal.partitions():
        names = {row_name(partition, key): key for key in journal.keys(partition)}
        missing = [key for name, key in names.items() if name not in known]
        known -= names.keys()
        for at in range(0, len(missing), ROWS_PER_BATCH):
            batch = missing[at : at + ROWS_PER_BATCH]
            published += _publish(journal, origin, link, partition, batch, listed)
    known.update(name for name in litter if listed.get(name) == "")
    strays = [name for name in known if not _is_wanted(journal, name)]
    for at in range(0, len(strays), ROWS_PER_BATCH):
        batch = strays[at : at + ROWS_PER_BATCH]
        link.clear(batch)
        for name in batch:
            # A put may have come meanwhile and counted on what was just cleared.
            if _is_wanted(journal, name):
                _publish_again(journal, origin, link, name)
    return published, len(strays)


def _publish(
    journal: StagingStore,
    origin: bytes,
    link: QueueLink,
    partition: str,
    keys: list[str],
    listed: dict[str, str],
) -> int:
    entries: list[Entry] = []
    for key in keys:
        try:
            (row,) = journal.get(partition, [key])
            for sha in attachment_hashes(row):
                name = blob_name(sha)
                if not listed.get(name):
                    link.put([blob_entry(origin, sha, journal.get_blob(sha))])
                    listed[name] = origin.hex()
        except MissingRowError:
            continue  # removed meanwhile
        except CorruptRowError as exc:
            logger.error("the journal has a damaged row, which is not published: %s", exc)
            continue
        entries.append(row_entry(origin, partition, key, pack_row(partition, key, row), row))
    link.put(entries)
    return len(entries)


def _publish_again(journal: StagingStore, origin: bytes, link: QueueLink, name: str) -> None:
    place = parse_row_name(name)
    if place is not None:
        _publish(journal, origin, link, place[0], [place[1]], {})
        return
    with contextlib.suppress(MissingRowError, CorruptRowError):
        sha = blob_hash(name)
        link.put([blob_entry(origin, sha, journal.get_blob(sha))])


def attachment_hashes(row: pa.RecordBatch) -> list[bytes]:
    """Hashes of the blobs that a staged row names; other rows name none."""
    at = row.schema.get_field_index("attachments")
    if at < 0:
        return []
    return [entry["sha256"] for entry in row.column(at)[0].as_py() or ()]


def _is_wanted(journal: StagingStore, name: str) -> bool:
    place = parse_row_name(name)
    try:
        if place is None:
            journal.get_blob(blob_hash(name))
        else:
            journal.get(place[0], [place[1]])
    except MissingRowError:
        return False
    except CorruptRowError:
        return True  # damaged here, but perhaps whole there
    return True
