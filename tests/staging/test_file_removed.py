"""A store whose files are taken away while it is open acknowledges nothing more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tokenplane.schemas.errors import StoreUnavailableError
from tokenplane.staging.contract_suite.backend import plain_row
from tokenplane.staging.open_store import open_store


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_row_that_nobody_could_read_is_not_acknowledged(
    tmp_path: Path, durability: str, replaced: bool
) -> None:
    root = tmp_path / "store"
    url = f"{root.as_uri()}?durability={durability}"
    with open_store(url) as store:
        assert store.put("p", "before", plain_row(1))
        shutil.rmtree(root)
        if replaced:
            with open_store(url) as other:
                assert other.put("p", "other", plain_row(2))
        for attempt in range(2):
            with pytest.raises(StoreUnavailableError, match="removed or replaced"):
                store.put("p", f"after {attempt}", plain_row(3))
        with pytest.raises(StoreUnavailableError, match="removed or replaced"):
            store.discard("p", ["before"])
    with open_store(url) as again:
        assert again.keys("p") == (["other"] if replaced else [])
        assert again.put("p", "after 0", plain_row(3))


def test_a_store_that_is_moved_away_is_still_whole(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_store(root.as_uri()) as store:
        store.put("p", "a", plain_row(1))
        root.rename(tmp_path / "moved")
        with pytest.raises(StoreUnavailableError, match="removed or replaced"):
            store.put("p", "b", plain_row(2))
        (tmp_path / "moved").rename(root)
        assert store.put("p", "c", plain_row(3))
    with open_store(root.as_uri()) as again:
        assert {"a", "c"} <= set(again.keys("p"))
