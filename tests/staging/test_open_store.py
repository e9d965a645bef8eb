"""From a URL to a store: schemes, missing libraries, and the errors of both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokenplane.schemas.errors import ConfigError, StoreError, UnsupportedStoreError
from tokenplane.staging.contract_suite.backend import FakeClock, plain_row
from tokenplane.staging.open_store import BACKENDS, open_store
from tokenplane.staging.store_url import parse_store_url, shown_url


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedStoreError) as caught:
        open_store("s3://bucket/x")
    for scheme in BACKENDS:
        assert f"{scheme}:" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("redis://localhost:1", "tokenplane[redis]"),
        ("rediss://localhost:1", "tokenplane[redis]"),
        ("tq://run", "tokenplane[ray]"),
    ],
)
def test_a_backend_that_does_not_import_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, extra: str
) -> None:
    module = BACKENDS[url.partition(":")[0]].partition(":")[0]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedStoreError) as caught:
        open_store(url)
    assert extra in str(caught.value)


def test_a_missing_library_is_named() -> None:
    program = (
        "import sys; sys.modules['redis'] = None\n"
        "from tokenplane.staging import open_store\n"
        "try: open_store('redis://localhost:1')\n"
        "except Exception as exc: print(type(exc).__name__, exc)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.startswith("UnsupportedStoreError redis: needs the module redis")


@pytest.mark.parametrize(
    "url", ["", "memory:?max_bytes=x", "memory:?size=1", "memory:?max_bytes=1&max_bytes=2"]
)
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:1/0", "redis://***@host:1/0"),
        ("redis://:p@/?w@host/0?timeout_s=1", "redis://***@host/0?timeout_s=1"),
        ("redis://host/0?password=pw&timeout_s=1", "redis://host/0?password=***&timeout_s=1"),
        ("other://user:pw@host/a@b", "other://***@host/a@b"),
        ("tq://local?journal=redis://:pw@host:1/0", "tq://local?journal=redis://***@host:1/0"),
        (
            "tq://local?journal=redis%3A%2F%2F%3Apw%40host",
            "tq://local?journal=redis%3A%2F%2F***%40host",
        ),
        ("file:///a@b/c", "file:///a@b/c"),
        ("memory:", "memory:"),
    ],
)
def test_a_url_is_shown_without_its_login(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret@[::1/0",
        "redis://:s3c/ret@host/0",
        "redis://:s3cret@host/abc?timeout_s=x",
        "redis://:s3cret@host/0?timeout_s=0&timeout_s=1",
        "redis://host/0?password=s3cret",
        "nosuch://:s3cret@host",
        "tq://local?journal=redis://:s3cret@[x",
        "file://:s3cret@host/x",
    ],
)
def test_a_refused_url_does_not_tell_its_password(url: str) -> None:
    with pytest.raises((StoreError, ConfigError)) as refused:
        open_store(url)
    assert "s3c" not in str(refused.value)


def test_a_memory_store_takes_its_options_and_clock() -> None:
    clock = FakeClock()
    with open_store("memory:?max_bytes=5000&full_wait_s=0", clock=clock) as store:
        assert store.stats().max_bytes == 5000
        store.put("p", "k", plain_row())
        (claim,) = store.claim("p", "c", max_rows=1, lease_s=5)
        assert claim.expires_at_s == clock() + 5


def test_a_scheme_is_read_in_any_case(tmp_path: Path) -> None:
    with open_store(f"FILE:{tmp_path}/s") as store:
        assert store.durable == "power"


def test_a_path_without_a_scheme_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "100%?x=1"
    with open_store(str(path)) as store:
        store.put("p", "k", plain_row())
    assert (path / "rows.sqlite").exists()


def test_a_url_keeps_its_parts() -> None:
    url = parse_store_url("file:///a%20b/c?mode=ro&max_bytes=7")
    assert (url.scheme, url.rest) == ("file", "///a%20b/c")
    assert url.options(mode=str, max_bytes=int) == {"mode": "ro", "max_bytes": 7}


@pytest.mark.parametrize("url", sorted(BACKENDS))
def test_a_kind_without_its_colon_makes_no_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedStoreError) as caught:
        open_store(url)
    assert f"{url}:" in str(caught.value)
    assert not list(tmp_path.iterdir())
    open_store(f"./{url}").close()
