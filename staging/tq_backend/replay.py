"""Makes a TransferQueue hold a journal's rows: after a loss, a restart, or removals."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from tokenplane.schemas.errors import CorruptRowError, MissingRowError
from tokenplane.schemas.row_message import encode_message, message_digest
from tokenplane.staging.row_packing import row_binding
from tokenplane.staging.store import StagingStore
from tokenplane.staging.tq_backend.payload import blob_name, parse_row_name, row_name, wrap

if TYPE_CHECKING:
    from tokenplane.staging.tq_backend.link import QueueLink

logger = logging.getLogger("tokenplane.staging")

ROWS_PER_BATCH: Final = 32


def replay(journal: StagingStore, origin: bytes, link: QueueLink) -> tuple[int, int]:
    """Make the queue hold the journal's rows; (rows published, names cleared)."""
    tag = origin.hex()
    listed = link.names()
    known = {name for name, owner in listed.items() if owner == tag}
    published = 0
    for partition in journal.partitions():
        names = {row_name(partition, key): key for key in journal.keys(partition)}
        missing = [key for name, key in names.items() if name not in known]
        known -= names.keys()
        for at in range(0, len(missing), ROWS_PER_BATCH):
            published += _publish(
                journal, origin, link, partition, missing[at : at + ROWS_PER_BATCH], listed
            )
    strays = [name for name in known if not _is_wanted(journal, name)]
    for at in range(0, len(strays), ROWS_PER_BATCH):
        link.clear(strays[at : at + ROWS_PER_BATCH])
    return published, len(strays)


def _publish(
    journal: StagingStore,
    origin: bytes,
    link: QueueLink,
    partition: str,
    keys: list[str],
    listed: dict[str, str],
) -> int:
    tag = origin.hex()
    rows: list[tuple[str, bytearray, str]] = []
    for key in keys:
        try:
            (row,) = journal.get(partition, [key])
            for sha in attachment_hashes(row):
                name = blob_name(sha)
                if name not in listed:
                    link.put([(name, wrap(name, origin, sha, journal.get_blob(sha)), tag)])
                    listed[name] = tag
        except MissingRowError:
            continue  # removed meanwhile
        except CorruptRowError as exc:
            logger.error("the journal has a damaged row, which is not published: %s", exc)
            continue
        message = encode_message(row)
        name = row_name(partition, key)
        binding = row_binding(partition, key, message_digest(message))
        rows.append((name, wrap(name, origin, binding, message), tag))
    link.put(rows)
    return len(rows)


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
            journal.get_blob(bytes.fromhex(name.partition(":")[2]))
        else:
            journal.get(place[0], [place[1]])
    except MissingRowError:
        return False
    except CorruptRowError:
        return True  # damaged here, but perhaps whole there
    return True
