"""What the demo proves from disk: rows against the engine's own log, and a replay elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenplane.engine_adapter.engine_log import read_engine_log
from tokenplane.tools.rollout_view import CallView, RolloutView


def rows_equal_engine(rollouts: Sequence[RolloutView], engine_log: Path) -> list[str]:
    """Where staged rows and the engine's log disagree; empty means that they are the same, id by
    id and bit by bit.

    Compared for every call: what the engine was conditioned on with the whole staged chain before
    the sampled tokens, what it sampled with the sampled tokens, and the log-probabilities.
    """
    logged = {request.request_id: request for request in read_engine_log(engine_log)}
    differences = [
        f"{rollout.rollout_id}: {problem.key}: {problem.code}"
        for rollout in rollouts
        for problem in rollout.problems
    ]
    calls = {_response_id(call): call for rollout in rollouts for call in rollout.calls}
    twice = Counter(_response_id(call) for rollout in rollouts for call in rollout.calls)
    differences += [f"{ident}: staged {n} times" for ident, n in twice.items() if n > 1]
    differences += [f"{ident}: no staged row" for ident in logged.keys() - calls.keys()]
    for ident, call in calls.items():
        request = logged.get(ident)
        if request is None:
            differences.append(f"{ident}: not in the engine's log")
            continue
        staged = call.row.call
        given = staged.cum_len - staged.generation_len
        log_probs = staged.generation_log_probs_delta[-staged.generation_len :]
        for name, one, other in (
            ("prompt", call.token_ids[:given], request.prompt_token_ids),
            ("sampled", call.token_ids[given:], request.generated_token_ids),
            ("logprobs", log_probs.view(np.int32), request.generated_log_probs.view(np.int32)),
        ):
            if not np.array_equal(one, other):
                differences.append(f"{ident}: {name} differ")
    return differences


def _response_id(call: CallView) -> str:
    ledger = call.row.ledger
    return call.row.staging_key if ledger is None else ledger.response_id


def replay_elsewhere(store: Path, parquet: Path) -> tuple[bool, str]:
    """Whether a fresh process that reads everything from disk finds all verified and identical.

    Returns:
        The verdict, and what the process said.
    """
    command = [sys.executable, "-m", "tokenplane.tools.cli", "replay", str(store), "--check"]
    done = subprocess.run(
        [*command, "--parquet", str(parquet)], capture_output=True, text=True, check=False
    )
    return done.returncode == 0, (done.stdout + done.stderr).strip()
