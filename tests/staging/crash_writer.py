"""Run as a program: write rows until killed, and tell of each one that was acknowledged.

``crash_writer.py URL WRITER FIRST`` puts rows ``WRITER/FIRST``, ``WRITER/FIRST+1``, ... and prints
a key after its put has returned. Every fourth row has a blob; ``seal`` as WRITER seals instead.
"""

from __future__ import annotations

import os
import sys

from tokenplane.schemas.errors import MissingRowError
from tokenplane.staging.contract_suite.backend import plain_row
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store_types import Blob, to_blob


def blobs_of(number: int) -> list[Blob]:
    """Every fourth row has a blob; neighbours share theirs."""
    return [] if number % 4 else [to_blob(f"blob {number // 8}".encode() * 3000)]


def write(url: str, writer: str, number: int) -> None:
    with open_store(url) as store:
        while True:
            key = f"{writer}/{number}"
            store.put("p", key, plain_row(number, size=number % 9000), blobs=blobs_of(number))
            os.write(1, f"{key}\n".encode())
            number += 1


def seal(url: str, number: int) -> None:
    """Fill a partition, seal it, go on with the next."""
    with open_store(url) as store:
        while True:
            for row in range(30):
                store.put(f"sealed{number}", str(row), plain_row(row, size=500))
            os.write(1, f"{number}\n".encode())
            try:
                store.seal(f"sealed{number}")
            except MissingRowError:
                sys.exit(3)
            number += 1


if __name__ == "__main__":
    if sys.argv[2] == "seal":
        seal(sys.argv[1], int(sys.argv[3]))
    else:
        write(sys.argv[1], sys.argv[2], int(sys.argv[3]))
