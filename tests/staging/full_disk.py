"""Run as a program: fill a store on a disk with little room, make room, and go on.

``full_disk.py URL FILLER LIMIT``: FILLER is a file on the same disk that is removed to make room;
with LIMIT > 0 no file of this process may grow beyond that many bytes (instead of a small disk).
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from tokenplane.schemas.errors import StoreFullError
from tokenplane.staging.contract_suite.backend import plain_row, same_bits
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.store_types import to_blob

ROW_BYTES = 20_000


def fill(store: StagingStore) -> tuple[list[str], str]:
    """Keys that were acknowledged, and the error of the first put that was not."""
    done: list[str] = []
    try:
        for number in range(10_000):
            store.put("p", str(number), plain_row(number, size=ROW_BYTES))
            done.append(str(number))
    except StoreFullError as exc:
        return done, str(exc)
    raise SystemExit("the disk was never full")


def main(url: str, filler: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store(f"{url}?full_wait_s=0.2")
    ceiling = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, ceiling[1]))
    done, error = fill(store)
    blob = to_blob(b"b" * 3_000_000)
    try:
        store.put("p", "with a blob", plain_row(1), blobs=[blob])
    except StoreFullError:
        refused = True
    else:
        refused = False
    intact = store.keys("p") == done and all(
        same_bits(row, plain_row(int(key), size=ROW_BYTES)) for key, row in store.scan("p")
    )
    filler.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, ceiling)
    goes_on = store.put("p", "with a blob", plain_row(1), blobs=[blob])
    store.close()
    with open_store(url) as again:
        reopened = again.keys("p") == [*done, "with a blob"]
    print(
        json.dumps(
            {
                "rows": len(done),
                "error": error,
                "blob refused": refused,
                "intact": intact,
                "goes on": goes_on,
                "reopened": reopened,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
