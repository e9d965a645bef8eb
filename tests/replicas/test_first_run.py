"""Of several runs under one idempotency key, the index knows the first written one as the call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenplane.capture.ledger_index import LedgerRow, RolloutIndex

RUNS = st.lists(st.tuples(st.sampled_from([None, "k1", "k2"]), st.sampled_from("xyz")), max_size=12)


def row(number: int, key: str | None, context: str) -> LedgerRow:
    return LedgerRow(
        staging_key=f"r1/c{number}/a",
        rollout_id="r1",
        model_call_id=f"c{number}",
        parent_call_id=None,
        mode="text",
        prev_len=0,
        delta_len=4,
        cum_len=4,
        weight_version=0,
        digest=f"{number:064x}",
        extras_digest="0" * 64,
        chain_hash=f"{number:064x}",
        cumulative_hash=f"{number:064x}",
        admitted_at=None,
        created_at=float(number),
        response_id=f"chatcmpl-{number}",
        parent_staging_key=None,
        context_len=2,
        idempotency_key=key,
        context_digest=context,
        output_fingerprint=None,
        continuation_fingerprint=None,
        request_digest=None,
    )


@given(RUNS)
def test_a_key_has_one_call_and_it_is_the_first_written(runs: list[tuple[str | None, str]]) -> None:
    rows = [row(number, *run) for number, run in enumerate(runs)]
    index = RolloutIndex("r1")
    for one in [*rows, *rows]:  # a row that is known already changes nothing
        index.add(one)
    first = {one.idempotency_key: one for one in reversed(rows)}
    calls = [
        one for one in rows if one.idempotency_key is None or first[one.idempotency_key] is one
    ]
    assert index.calls() == calls
    assert len(index.rows) == len(rows)
    for one in rows:
        known = index.by_response(one.response_id or "")
        assert known == (one if one in calls else None)
        if one.idempotency_key is not None:
            assert index.repeat_of(one.idempotency_key) is first[one.idempotency_key]
    for context in "xyz":
        assert index.candidates(context) == [c for c in calls if c.context_digest == context]
    # A first run that retention removed leaves the next one as the call.
    for removed in calls:
        rest = index.forget({removed.staging_key})
        again = RolloutIndex("r1")
        for one in rows:
            if one is not removed:
                again.add(one)
        assert rest.calls() == again.calls()
