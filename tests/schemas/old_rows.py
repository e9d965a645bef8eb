"""The rows behind tests/data/*_v1.bin, and the script that wrote those files.

    .venv/bin/python -m tests.schemas.old_rows    write the present versions where missing

A file of an old version is never written again: that is what it is for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tokenplane.schemas.row_message import encode_message
from tokenplane.schemas.staged_call import StagedCall, build_staged_call
from tokenplane.schemas.staged_row import (
    STAGED_ROW_VERSION,
    AttachmentRef,
    CallEvidence,
    LedgerEntry,
    Sampling,
    StagedRow,
)
from tokenplane.schemas.tokens import frozen, to_log_probs, to_mask, to_token_ids
from tokenplane.schemas.training_row import TRAINING_ROW_VERSION, CallSpan, TrainingRow

DATA = Path(__file__).resolve().parents[1] / "data"


def staged_row_v1() -> StagedRow:
    """Every column of version 1 set, with the values that are easily lost."""
    call: StagedCall = build_staged_call(
        rollout_id="röll-1",
        model_call_id="呼び出し-2",
        parent_call_id="call-1",
        mode="token_in",
        prev_len=2,
        weight_version=2**64 - 1,
        parent_chain_hash="11" * 32,
        prompt_token_ids=to_token_ids([5, 7, 2**31 - 1]),
        generated_token_ids=to_token_ids([0, 9, 9]),
        generated_log_probs=to_log_probs([-0.0, -1e-45, -3.25]),
        extras={"b": [1, 1.0, None, True], "a": "é"},
    )
    return StagedRow(
        staging_key="röll-1/呼び出し-2/0011223344556677",
        call=call,
        evidence=CallEvidence(
            policy_epochs=((0, 7), (4, 8)),
            kv_cache_epochs=((0, 7),),
            num_evictions=1,
            sampling=Sampling(0.7, 40, 0.9, 256, -5, (2, 3), ("</s>", "é"), True),
            logprobs_mode="raw",
            finish_reason="stop",
            stop_reason='"</s>"',
            model="tiny",
            model_fingerprint="aa",
            tokenizer_fingerprint="bb",
            template_fingerprint="cc",
            engine="megatron-core 0.19.2 cpu",
            prefix_source="store",
            splice_notes=("terminator_added",),
            admitted_at=1764430000.5,
        ),
        created_at=1764430001.25,
        ledger=LedgerEntry(
            response_id="chatcmpl-1",
            parent_staging_key="röll-1/call-1/0",
            context_len=3,
            context_digest="22" * 32,
            output_fingerprint="33" * 32,
            continuation_fingerprint="44" * 32,
            idempotency_key="idem",
            request_digest="55" * 32,
            response_body='{"id": "chatcmpl-1"}',
        ),
        attachments=(AttachmentRef("routed_experts", "int16", (4, 2, 2), bytes(range(32)), 32),),
    )


def training_row_v1() -> TrainingRow:
    """Every column of version 1 set."""
    return TrainingRow(
        row_id="röll-1#0",
        rollout_id="röll-1",
        token_ids=to_token_ids([5, 2**31 - 1, 0, 9]),
        token_mask=to_mask([0, 1, 0, 1]),
        log_probs=to_log_probs([0.0, -0.0, 0.0, -1e-45]),
        weight_versions=frozen(np.array([-1, 7, -1, 2**63 - 1], np.int64)),
        prompt_len=1,
        call_spans=(
            CallSpan("call-1", "röll-1/call-1/0", 0, 1, 1, 7, "66" * 32),
            CallSpan("呼び出し-2", "röll-1/呼び出し-2/1", 2, 1, 1, 2**64 - 1, "77" * 32),
        ),
        created_at=1764430001.25,
        group_id="group-é",
        segment=1,
        reward=-0.0,
        sample_mask=0,
        reason="salvaged_prefix",
        salvaged=True,
        terminal_model_call_id="呼び出し-2",
        terminal_selection="declared",
        logprobs_mode="raw",
        model_fingerprint="aa",
        tokenizer_fingerprint="bb",
        cumulative_hash="88" * 32,
    )


def main() -> None:
    for name, version, row in (
        ("staged_row", STAGED_ROW_VERSION, staged_row_v1()),
        ("training_row", TRAINING_ROW_VERSION, training_row_v1()),
    ):
        path = DATA / f"{name}_v{version}.bin"
        if path.exists():
            print(f"{path.name} is there already and stays as it is")
        else:
            path.write_bytes(encode_message(row.to_batch()))
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
