"""What the Redis store does beyond the contract."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.stores.proxy import Proxy
from tests.stores.redis_backend import RedisBackend
from tests.stores.redis_server import RedisServer
from tokenplane.schemas.errors import (
    ConfigError,
    CorruptRowError,
    KeyConflictError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedStoreError,
)
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_row import TOKEN_COLUMNS
from tokenplane.staging import row_split
from tokenplane.staging.contract_suite.backend import plain_row, same_bits, staged_row
from tokenplane.staging.contract_suite.stateful import run_random_operations
from tokenplane.staging.open_store import open_store
from tokenplane.staging.redis_backend.durability import durability_of
from tokenplane.staging.redis_backend.store import RedisStore
from tokenplane.staging.store_types import to_blob


@pytest.fixture
def backend(redis_server: RedisServer) -> RedisBackend:
    return RedisBackend(redis_server)


def test_random_operations(backend: RedisBackend) -> None:
    run_random_operations(backend, reopens=True, max_examples=12)


def test_resolving_moves_the_token_columns_only(backend: RedisBackend) -> None:
    row = staged_row(prompt=range(3000), generated=range(1000))
    with backend.open() as store:
        store.put("staged", row.staging_key, row.to_batch())

        def sent() -> int:
            info = backend.client.info("stats")
            assert isinstance(info, dict)
            return int(info["total_net_output_bytes"])

        before = sent()
        (found,) = store.get("staged", [row.staging_key], TOKEN_COLUMNS)
        moved = sent() - before
        tokens = 4 * 4000 + 4000
        assert tokens < moved < tokens + 4000
        assert len(encode_message(row.to_batch())) > 1.5 * moved
        assert found.equals(row.to_batch().select(list(TOKEN_COLUMNS)))
        (some,) = store.get("staged", [row.staging_key], ["cum_len", "rollout_id"])
        assert some.schema.names == ["cum_len", "rollout_id"]


def test_damaged_rows_are_never_served(backend: RedisBackend) -> None:
    row, other = staged_row("r", "c"), staged_row("r", "d")
    batch = row.to_batch()
    with backend.open() as store:
        store.put("staged", row.staging_key, batch)
        store.put("staged", other.staging_key, other.to_batch())
        name = backend.name("m", "staged", row.staging_key)
        whole = backend.client.get(name)
        foreign = backend.client.get(backend.name("m", "staged", other.staging_key))
        assert isinstance(whole, bytes)
        assert isinstance(foreign, bytes)
        tokens_end = struct.unpack("<II", whole[60:68])
        damaged = [foreign, b"", whole[:50], whole[:79], whole[:200], whole[: sum(tokens_end) - 1]]
        for at in range(0, len(whole), 7):
            flipped = bytearray(whole)
            flipped[at] ^= 4
            damaged.append(bytes(flipped))
        caught = {TOKEN_COLUMNS: 0, None: 0}
        for content in damaged:
            backend.client.set(name, content)
            for columns in (TOKEN_COLUMNS, None):
                try:  # each read checks what it reads, so what it does not need may be damaged
                    (found,) = store.get("staged", [row.staging_key], columns)
                    assert same_bits(found, batch if columns is None else batch.select(columns))
                except CorruptRowError:
                    caught[columns] += 1
        assert caught[None] > len(whole) / 7 * 0.9
        assert caught[TOKEN_COLUMNS] > (tokens_end[1] + 144) / 7 * 0.9
        backend.client.set(name, whole)
        assert same_bits(store.get("staged", [row.staging_key])[0], batch)


def test_a_chain_of_too_many_tokens_for_one_array_is_read_in_parts(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_split, "MOST_TOKENS", 10)
    rows = [staged_row("r", str(number), prompt=range(number + 1)) for number in range(7)]
    with backend.open() as store:
        for row in rows:
            store.put("staged", row.staging_key, row.to_batch())
        found = store.get("staged", [row.staging_key for row in rows], TOKEN_COLUMNS)
    for row, batch in zip(rows, found, strict=True):
        assert same_bits(batch, row.to_batch().select(TOKEN_COLUMNS))


def test_what_is_removed_under_a_scan_is_kept_for_it_alone(backend: RedisBackend) -> None:
    with backend.open() as store:
        keys = [f"k{number}" for number in range(200)]
        for number, key in enumerate(keys):
            store.put("p", key, plain_row(number))
        scan = store.scan("p")
        next(scan)
        store.discard("p", keys[1:])
        store.put("p", "k150", plain_row(7))
        kept = list(backend.client.scan_iter(f"{{{backend.namespace}}}:g:*"))
        assert len(kept) == 199
        rest = list(scan)
        assert [key for key, _ in rest] == keys[1:]
        assert all(same_bits(row, plain_row(int(key[1:]))) for key, row in rest)
        assert list(backend.client.scan_iter(f"{{{backend.namespace}}}:g*")) == []
        store.discard("p", ["k0", "k150"])
        left = {bytes(name) for name in backend.client.scan_iter(f"{{{backend.namespace}}}:*")}
        assert left == {f"{{{backend.namespace}}}:t".encode()}


def test_a_known_blob_is_not_sent_again(backend: RedisBackend) -> None:
    blob = to_blob(b"b" * 1_000_000)
    with backend.open() as store:
        store.put("p", "k", plain_row(1), blobs=[blob])
        info = backend.client.info("stats")
        assert isinstance(info, dict)
        before = int(info["total_net_input_bytes"])
        store.put("p", "l", plain_row(2), blobs=[blob])
        info = backend.client.info("stats")
        assert isinstance(info, dict)
        assert int(info["total_net_input_bytes"]) - before < 50_000
        store.discard("p", ["k", "l"])
        assert store.put("p", "m", plain_row(3), blobs=[blob])
        assert store.get_blob(blob.sha256).size == 1_000_000
        place = f"{{{backend.namespace}}}:b:".encode() + blob.sha256
        assert backend.client.ttl(place) == -1  # an upload expires, a stored blob never
        assert list(backend.client.scan_iter(f"{{{backend.namespace}}}:u:*")) == []


def test_a_refused_upload_is_removed(backend: RedisBackend) -> None:
    with backend.open(max_bytes=250_000, full_wait_s=0.1) as store:
        store.put("p", "k", plain_row(1), blobs=[to_blob(b"a" * 100_000)])
        with pytest.raises(StoreFullError):
            store.put("p", "l", plain_row(2), blobs=[to_blob(b"b" * 200_000)])
        with pytest.raises(KeyConflictError):
            store.put("p", "k", plain_row(2), blobs=[to_blob(b"c" * 90_000)])
        assert list(backend.client.scan_iter(f"{{{backend.namespace}}}:u:*")) == []
        assert store.put("p", "l", plain_row(2), blobs=[to_blob(b"a" * 100_000)])


def test_times_are_the_servers_unless_a_clock_is_given(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with open_store(f"{backend.server.url}?namespace={backend.namespace}") as store:
        monkeypatch.setattr(time, "time", lambda: now + 1e6)  # this host's clock jumps
        store.put("p", "k", plain_row())
        (claim,) = store.claim("p", "c", max_rows=1, lease_s=10)
        assert abs(claim.expires_at_s - now - 10) < 30
        assert store.claim("p", "c", max_rows=1, lease_s=10) == []


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server whose settings the tests change; it wants a password."""
    server = RedisServer(tmp_path_factory.mktemp("odd"), requirepass="secret")
    yield server
    server.stop()


def test_it_says_what_durability_it_found(
    odd_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = odd_server.url
    client = odd_server.client()
    with RedisStore(url) as store:
        assert store.durable == "power"
        assert "secret" not in store.url
    for setting, durable in (("no", "process"), ("everysec", "none")):
        client.config_set("appendfsync", setting)
        with caplog.at_level(logging.WARNING), RedisStore(url) as store:
            assert store.durable == durable
        assert f"appendfsync {setting}" in caplog.text
        with pytest.raises(UnsupportedStoreError, match="always"):
            RedisStore(url, require="power")
    client.config_set("appendfsync", "always")
    client.config_set("no-appendfsync-on-rewrite", "yes")
    with RedisStore(url) as store:
        assert store.durable == "process"
    client.config_set("no-appendfsync-on-rewrite", "no")


def test_a_server_that_hides_its_settings_promises_nothing() -> None:
    assert durability_of({}) == "none"
    assert durability_of({"appendonly": "yes", "appendfsync": "always"}) == "process"


def test_a_server_that_evicts_rows_is_refused(odd_server: RedisServer) -> None:
    url = odd_server.url
    client = odd_server.client()
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(UnsupportedStoreError, match="evicts"):
        RedisStore(url)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "0")


def test_a_server_without_memory_is_full_and_keeps_what_it_has(odd_server: RedisServer) -> None:
    client = odd_server.client()
    with RedisStore(odd_server.url, namespace="full") as store:
        store.put("p", "k", plain_row(1))
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreFullError) as caught:
            store.put("p", "l", plain_row(2, size=100_000))
        assert caught.value.retryable
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
        assert store.keys("p") == ["k"]
        client.config_set("maxmemory", "0")
        assert store.put("p", "l", plain_row(2))


def test_a_wrong_password_is_refused_at_once(odd_server: RedisServer) -> None:
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        RedisStore(f"redis://:wrong@127.0.0.1:{odd_server.port}/0")
    assert time.monotonic() - started < 5
    assert not caught.value.retryable
    assert "wrong@" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    ["namespace=a{b}", "namespace=", "unknown=1", "timeout_s=x", "timeout_s=0", "ssl_ca_certs=x"],
)
def test_a_bad_option_is_refused(redis_server: RedisServer, query: str) -> None:
    with pytest.raises(ConfigError):
        open_store(f"{redis_server.url}?{query}")


@pytest.mark.parametrize("path", ["run1", "0/run1", "-1"])
def test_a_path_that_is_no_database_is_refused(redis_server: RedisServer, path: str) -> None:
    with pytest.raises(ConfigError, match="database number"):
        open_store(f"redis://127.0.0.1:{redis_server.port}/{path}")


def test_nobody_there(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.stop()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        open_store(f"{server.url}?timeout_s=0.5")
    assert time.monotonic() - started < 5


def test_a_store_over_tls(redis_server: RedisServer, tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    proxy = Proxy(redis_server.port, tls=(certificate, key))
    url = f"rediss://127.0.0.1:{proxy.port}/0?namespace=tls&timeout_s=1"
    with open_store(f"{url}&ssl_ca_certs={certificate}") as store:
        assert store.put("p", "k", plain_row(1))
        assert same_bits(store.get("p", ["k"])[0], plain_row(1))
    with pytest.raises(StoreUnavailableError):
        open_store(url)  # nobody vouches for the certificate
    proxy.close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    built = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key
