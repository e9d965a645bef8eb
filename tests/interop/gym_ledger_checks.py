"""Our ledger beside NeMo-Gym's own, in Gym's environment; prints what was found as one JSON line.

    gym_ledger_checks.py STORE_URL FOLDER SEED

``STORE_URL`` for ours, ``FOLDER`` for Gym's file ledger.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
import sys
from typing import Any

from nemo_gym.token_id_capture.config import (  # type: ignore[import-not-found,unused-ignore]
    TokenIdCaptureConfig,
)
from nemo_gym.token_id_capture.conformance import (  # type: ignore[import-not-found,unused-ignore]
    _check_lineage_visibility,
)
from nemo_gym.token_id_capture.lineage import (  # type: ignore[import-not-found,unused-ignore]
    FileLineageStore,
)
from nemo_gym.token_id_capture.protocols import (  # type: ignore[import-not-found,unused-ignore]
    CaptureLedger,
)
from nemo_gym.token_id_capture.staging import (  # type: ignore[import-not-found,unused-ignore]
    CallRecord,
    CaptureLedgerCommit,
)

from tokenplane.schemas.errors import KeyConflictError

NAME = "tokenplane.capture.gym_ledger:GymLedger"
NO_EXTRAS = "a1edc33c107616cf344faf0103daa025cfb125f8e1c784ae5f6a49faf2b768b6"


def digest_of(value: Any) -> str:
    """A stand-in hash: ledgers compare hashes and never recompute them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def open_ours(url: str) -> Any:
    """Our ledger, made by Gym's own loader from its own settings."""
    settings = {
        "enabled": True,
        "external_staging": True,
        "rebuild_response": False,
        "lineage_store": NAME,
        "lineage_store_kwargs": {"store": url},
    }
    return TokenIdCaptureConfig.model_validate({"token_id_capture": settings}).build_lineage_store()


def make_commit(
    rollout: str, call: str, parent: Any, tokens: list[int], items: Any, answer: Any
) -> Any:
    """A commit for ``tokens`` (the whole sequence) below ``parent`` (a match, or None)."""
    prev = 0 if parent is None else parent.prev_len
    key = f"{rollout}/{call}/1"
    record = CallRecord(
        model_call_id=call,
        parent_call_id=None if parent is None else parent.model_call_id,
        prev_len=prev,
        delta_len=len(tokens) - prev,
        cum_len=len(tokens),
        weight_version=1,
        digest=digest_of([call, tokens]),
        extras_digest=NO_EXTRAS,
        staging_key=key,
        mode="text" if parent is None else "token_in",
        chain_hash=digest_of(["chain", tokens]),
        cumulative_hash=digest_of(tokens),
        response_id=f"response-{call}",
        admitted_at=float(len(tokens)),
        fingerprint_version=2,
    )
    chain = () if parent is None else tuple(parent.staging_chain)
    return CaptureLedgerCommit(
        rollout_id=rollout,
        record=record,
        staging_chain=(*chain, key),
        request_items=items,
        response_items=answer,
    )


class StagedTokens:
    """What Gym's conformance check takes for a token sink: commits, and keeps tokens by key.

    A ledger under external staging holds no tokens (Gym's own does not either), and the check wants
    the parent's; they come from here by the resolved staging chain.
    """

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self._tokens: dict[str, list[int]] = {}

    async def put(self, entry: Any) -> None:
        tokens = [*entry.prompt_token_ids, *entry.generation_token_ids]
        items = [{"role": "user", "content": "What is the weather in Paris?"}]
        commit = make_commit(
            entry.rollout_id, entry.model_call_id, None, tokens, items, list(entry.output_items)
        )
        self._tokens[commit.record.staging_key] = tokens
        await self._ledger.record(commit)

    def resolver(self, ledger: Any) -> Any:
        staged = self._tokens

        class Resolver:
            async def resolve(self, rollout: str, items: list[dict[str, Any]]) -> Any:
                found = await ledger.resolve(rollout, items)
                if found.match is None:
                    return found
                tokens = tuple(t for key in found.match.staging_chain for t in staged[key])
                match = dataclasses.replace(found.match, cumulative_token_ids=tokens)
                return dataclasses.replace(found, match=match)

        return Resolver()


async def conformance(url: str) -> list[str]:
    """Gym's lineage checks; raises where one fails."""
    passed = []
    for fresh in (False, True):
        sink = StagedTokens(open_ours(url))
        await _check_lineage_visibility(
            sink,
            lambda sink=sink: sink.resolver(open_ours(url)),
            f"conformance-{fresh}",
            fresh_client=fresh,
        )
        passed.append("fresh_client_lineage_visibility" if fresh else "lineage_visibility")
    return passed


def plain(resolution: Any) -> list[Any]:
    """A resolution as comparable data."""
    match = resolution.match
    if match is None:
        return [str(resolution.status)]
    return [
        str(resolution.status),
        match.model_call_id,
        match.digest,
        list(match.staging_chain),
        match.prev_len,
        match.chain_hash,
        list(match.cumulative_token_ids),
    ]


async def compare(ours: Any, theirs: Any, seed: int) -> dict[str, int]:
    """Random rollouts through both ledgers; counts, after every difference was judged."""
    rng = random.Random(seed)
    counts = {"resolved": 0, "unresolved": 0, "root": 0, "only_ours": 0, "refused": 0}
    for number in range(25):
        rollout = f"{seed}-{number}"
        conversations: list[list[dict[str, Any]]] = [[]]
        commits: list[Any] = []
        for step in range(rng.randint(2, 10)):
            items = [*rng.choice(conversations), {"role": "user", "content": rng.choice("ab")}]
            if rng.random() < 0.1:
                items[0] = {"role": "user", "content": "c"}
            said, known = await asyncio.gather(
                ours.resolve(rollout, items), theirs.resolve(rollout, items)
            )
            if plain(said) != plain(known):
                # The stock ledger gives up on repeated answers; ours may not, where all agree.
                assert (str(known.status), str(said.status)) == ("unresolved", "resolved"), items
                twins = {
                    c.record.cumulative_hash for c in commits if c.response_items == items[-2:-1]
                }
                assert said.match.digest in twins
                counts["only_ours"] += 1
            counts[str(said.status)] += 1
            call = f"call-{step:02d}"
            if rng.random() < 0.2 or str(said.status) == "unresolved":
                for ledger in (ours, theirs):
                    await ledger.record_failure(rollout, call, "worker_capture_failed")
                    await ledger.record_failure(rollout, call, "worker_capture_failed")
                if commits and rng.random() < 0.5:
                    counts["refused"] += await both_refuse(ours, theirs, commits[-1], call)
                continue
            answer = [{"type": "message", "role": "assistant", "content": rng.choice("xyz")}]
            tokens = [ord(item["content"]) for item in [*items, *answer]]
            tokens[-1] += rng.choice((0, 0, 0, 1))  # the same text, sampled as another token
            commit = make_commit(rollout, call, said.match, tokens, items, answer)
            commits.append(commit)
            for ledger in (ours, theirs):
                await ledger.record(commit)
                await ledger.record(commit)
            conversations.append([*items, *answer])
            counts["refused"] += await both_refuse(ours, theirs, commit)
            if rng.random() < 0.1:
                for ledger in (ours, theirs):
                    await ledger.record_failure(rollout, call, "invalid_worker_commit_coordinates")
        assert await ours.manifest(rollout) == await theirs.manifest(rollout)
        assert await ours.has_rows(rollout) == await theirs.has_rows(rollout)
    return counts


async def both_refuse(ours: Any, theirs: Any, commit: Any, call: str | None = None) -> int:
    """1 if both ledgers refuse another commit under the same call, or under one that failed."""
    change = {"weight_version": 2} if call is None else {"model_call_id": call}
    other = commit.record.model_copy(update=change)
    refused = 0
    for ledger in (ours, theirs):
        try:
            await ledger.record(commit.model_copy(update={"record": other}))
        except (ValueError, KeyConflictError):
            refused += 1
    assert refused == 2
    return 1


async def main(url: str, folder: str, seed: int) -> dict[str, Any]:
    """Everything that is checked here."""
    ours, theirs = open_ours(url), FileLineageStore(folder)
    try:
        return {
            "type": f"{type(ours).__module__}:{type(ours).__qualname__}",
            "is_capture_ledger": isinstance(ours, CaptureLedger),
            "process_shared": ours.is_process_shared(),
            "conformance": await conformance(url),
            "compared": await compare(ours, theirs, seed),
            "loaded": sorted({name.partition(".")[0] for name in sys.modules}),
        }
    finally:
        await ours.close()
        await ours.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
