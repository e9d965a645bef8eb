"""A row's token columns apart from its message, and a chain of them read at once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenplane.schemas.errors import CorruptRowError
from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_row import TOKEN_COLUMNS
from tokenplane.staging.contract_suite.backend import plain_row, same_bits, staged_row
from tokenplane.staging.row_split import (
    cut_message,
    join_message,
    read_token_columns,
    token_part,
)
from tokenplane.staging.token_source import to_token_deltas


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=6),
    st.text(min_size=1, max_size=400).filter(lambda text: "\0" not in text and text.isprintable()),
    st.permutations(TOKEN_COLUMNS),
    st.integers(1, len(TOKEN_COLUMNS)),
)
def test_a_chain_read_at_once_is_its_rows(
    sizes: list[tuple[int, int]], rollout: str, order: list[str], width: int
) -> None:
    columns = order[:width]
    rows = [
        staged_row(rollout, str(number), prompt=range(prompt), generated=range(generated))
        for number, (prompt, generated) in enumerate(sizes)
    ]
    batches = [row.to_batch() for row in rows]
    keys = [row.staging_key for row in rows]
    parts = []
    for key, batch in zip(keys, batches, strict=True):
        message = encode_message(batch)
        part = token_part(message, batch, "p", key)
        assert part is not None
        tokens, rest = cut_message(message, part)
        assert join_message(part.head, tokens, rest, key) == message
        parts.append((part.head, tokens))
    found = read_token_columns("p", keys, parts, columns)
    assert all(
        same_bits(row, batch.select(columns)) for row, batch in zip(found, batches, strict=True)
    )
    deltas = to_token_deltas(read_token_columns("p", keys, parts, TOKEN_COLUMNS), keys)
    assert [delta.token_ids_delta.tolist() for delta in deltas] == [
        row.call.token_ids_delta.tolist() for row in rows
    ]
    assert [delta.generation_len for delta in deltas] == [generated for _, generated in sizes]
    assert to_token_deltas([], []) == []
    with pytest.raises(CorruptRowError):
        read_token_columns("q", keys, parts, columns)
    with pytest.raises(CorruptRowError):
        read_token_columns("p", [*keys[1:], "other"], parts, columns)


def test_only_a_staged_row_has_a_token_part() -> None:
    plain = plain_row()
    assert token_part(encode_message(plain), plain, "p", "k") is None
    row = staged_row().to_batch()
    at = row.schema.get_field_index("rollout_id")
    odd = row.set_column(at, row.schema.field(at), pa.array([None], pa.string()))
    assert token_part(encode_message(odd), odd, "p", "r/c/1") is None


def test_a_row_out_of_a_longer_batch_has_its_own_token_part() -> None:
    rows = [staged_row("r", str(number), prompt=range(number, 9)) for number in range(3)]
    together = pa.Table.from_batches([row.to_batch() for row in rows]).combine_chunks()
    for at, row in enumerate(rows):
        batch = together.to_batches()[0].slice(at, 1)
        message = encode_message(batch)
        part = token_part(message, batch, "p", row.staging_key)
        assert part is not None
        pair = part.head, cut_message(message, part)[0]
        (found,) = read_token_columns("p", [row.staging_key], [pair], TOKEN_COLUMNS)
        assert same_bits(found, row.to_batch().select(TOKEN_COLUMNS))
