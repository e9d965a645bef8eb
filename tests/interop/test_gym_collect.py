"""``tokenplane collect`` on a rollouts file and the real model server's manifests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.interop.gym_agents import ANSWERS, Agent, ChatAgent, ResponsesAgent, run_rollout
from tests.interop.gym_engine import listening
from tests.interop.gym_process import CONTROL_TOKEN, CONTROL_TOKEN_ENV, GymModelServer
from tests.interop.gym_proxy import EngineProxy
from tests.server.serving import encode, say, scripted
from tokenplane.capture.gym_ledger import GymLedger
from tokenplane.schemas.manifest import CaptureLedgerCommit
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.training_row import TRAINING_PARTITION, parse_training_row
from tokenplane.staging.open_store import open_store
from tokenplane.tools import collect, verify

pytestmark = [pytest.mark.engine]


@pytest.fixture
def gym(gym_servers: dict[str, GymModelServer], monkeypatch: pytest.MonkeyPatch) -> GymModelServer:
    monkeypatch.setenv(CONTROL_TOKEN_ENV, CONTROL_TOKEN)
    return gym_servers["megatron_worker"]


def record_of(agent: Agent, task: int, **fields: Any) -> dict[str, Any]:
    """The line that Gym's collector writes for a rollout, as far as ours reads it."""
    return {
        "_ng_rollout_id": agent.rollout,
        "_ng_task_index": task,
        "reward": 1.0,
        "response": agent.replies[-1] if agent.dialect == "responses" else None,
        **fields,
    }


class Run:
    """A finished run: a store, a rollouts file, and the command over both."""

    def __init__(self, gym: GymModelServer, folder: Path, name: str) -> None:
        self.gym, self.name = gym, name
        self.store_url = f"file://{folder}/store"
        self.rollouts = folder / "rollouts.jsonl"
        self.ids: list[str] = []
        self.parquet = folder / "rows.parquet"

    async def record(self, proxy: EngineProxy) -> list[str]:
        """Two whole rollouts, and one whose second turn edited the history."""
        records: list[dict[str, Any]] = []
        with open_store(self.store_url) as store:
            for task, kind in enumerate((ChatAgent, ResponsesAgent)):
                async with listening(scripted(map(say, ANSWERS)), proxy, store=store):
                    agent: Agent = kind(self.gym, f"{self.name}-{task}")
                    await run_rollout(agent)
                    records.append(record_of(agent, task))
            async with listening(scripted(map(say, ("One.", "Two."))), proxy, store=store):
                agent = ResponsesAgent(self.gym, f"{self.name}-2")
                await agent.ask("First?")
                agent.items[0] = {"role": "user", "content": "Zeroth?"}
                await agent.ask("Second?")
                records.append(record_of(agent, 2, reward=0))
        self.rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.ids = [record["_ng_rollout_id"] for record in records]
        return self.ids

    def keep(self, *rollouts: str) -> None:
        """Leave only these in the file."""
        lines = [json.loads(line) for line in self.rollouts.read_text().splitlines()]
        kept = [line for line in lines if line["_ng_rollout_id"] in rollouts]
        self.rollouts.write_text("".join(json.dumps(line) + "\n" for line in kept))

    async def collect(self, *flags: str) -> int:
        """The command's exit status. In a thread, as it blocks on the model server."""
        where = ["--gym", self.gym.url, "--store", self.store_url, "--rollouts", str(self.rollouts)]
        return await asyncio.to_thread(collect.main, [*where, *flags])

    def keys(self, partition: str) -> list[str]:
        with open_store(f"{self.store_url}?mode=ro") as store:
            return store.keys(partition)


async def test_every_rollout_has_its_row_and_a_reason_where_it_is_not_proven(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(gym, tmp_path, "collect")
    ids = await run.record(proxy)
    assert await run.collect("--parquet", str(run.parquet), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verified"], report["unverified"]) == (2, 1)
    found = {rollout["rollout_id"]: rollout for rollout in report["rollouts"]}
    assert [found[ident]["status"] for ident in ids] == ["verified", "verified", "placeholder"]
    assert [found[ident]["terminal"] for ident in ids[:2]] == ["heuristic", "response_id"]
    assert found[ids[2]]["reason"] == "unresolved_parent"
    assert [found[ident]["calls"] for ident in ids] == [4, 4, 0]
    assert found[ids[0]]["trainable"] == found[ids[1]]["trainable"] > 0
    assert run.keys(TRAINING_PARTITION) == ids
    table = pq.read_table(run.parquet)
    assert table.column("row_id").to_pylist() == ids
    assert table.column("group_id").to_pylist() == ["0", "1", "2"]
    assert await asyncio.to_thread(verify.main, [run.store_url, "--parquet", str(run.parquet)]) == 0


async def test_collecting_again_adds_nothing_and_cleaned_rows_stay_verified(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(gym, tmp_path, "again")
    ids = await run.record(proxy)
    run.keep(*ids[:2])
    assert await run.collect() == 0
    assert "2 of 2 rollouts have a verified row" in capsys.readouterr().out
    staged = run.keys(STAGED_PARTITION)
    assert await run.collect("--clean", "--json") == 0
    report = json.loads(capsys.readouterr().out)["rollouts"]
    assert [(r["published"], r["cleaned"]) for r in report] == [(0, 4), (0, 4)]
    assert len(run.keys(STAGED_PARTITION)) == len(staged) - 8
    for flags in (["--clean", "--json"], ["--strictness", "gym", "--json"]):
        assert await run.collect(*flags) == 0
        report = json.loads(capsys.readouterr().out)["rollouts"]
        assert [(r["status"], r["published"], r["cleaned"]) for r in report] == [
            ("verified", 0, 0)
        ] * 2
    assert run.keys(TRAINING_PARTITION) == ids[:2]


async def test_sub_agents_and_compacted_histories_give_rows_of_their_own(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rollout id, three conversations: each sampled token is in one row's loss."""
    run = Run(gym, tmp_path, "segments")
    with open_store(run.store_url) as store:
        said = ("One.", "A part.", "Two.", "Three.", "Four.")
        async with listening(scripted(map(say, said)), proxy, store=store):
            main, sub, after = (ResponsesAgent(gym, "segments") for _ in range(3))
            await main.ask("First?")
            await sub.ask("A part of it?")
            await main.ask("Second?")
            await after.ask("So far: one, two. Third?")
            await after.ask("Fourth?")
    run.rollouts.write_text(json.dumps(record_of(after, 0)) + "\n")
    assert await run.collect("--segments", "roots", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert (report["rows"], report["calls"], report["published"]) == (3, 5, 3)
    with open_store(f"{run.store_url}?mode=ro") as store:
        rows = [parse_training_row(row, key=key) for key, row in store.scan(TRAINING_PARTITION)]
    owned = {row.row_id: row.token_ids[row.token_mask == 1].tolist() for row in rows}
    assert owned == {
        name: [token for text in texts for token in encode(f"{text}<|im_end|>")]
        for name, texts in (
            ("segments", ("Three.", "Four.")),
            ("segments#1", ("One.", "Two.")),
            ("segments#2", ("A part.",)),
        )
    }


async def test_salvage_is_asked_for_and_marked(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(gym, tmp_path, "salvage")
    ids = await run.record(proxy)
    run.keep(ids[2])
    assert await run.collect("--salvage") == 1
    shown = capsys.readouterr().out
    assert "salvaged" in shown
    assert "1 x unresolved_parent" in shown
    assert run.keys(TRAINING_PARTITION) == [f"{ids[2]}~salvaged"]


async def test_a_later_verdict_never_replaces_a_published_row(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chain that was damaged when it was collected stays a placeholder, and says so."""
    run = Run(gym, tmp_path, "verdict")
    ids = await run.record(proxy)
    run.keep(ids[1])
    with open_store(run.store_url) as store:
        (key, *_) = store.keys(STAGED_PARTITION, f"{ids[1]}/")
        (row,) = store.get(STAGED_PARTITION, [key])
        store.discard(STAGED_PARTITION, [key])
        assert await run.collect() == 1
        assert "1 x missing_row" in capsys.readouterr().out
        store.put(STAGED_PARTITION, key, row)
    assert await run.collect() == 1
    assert "1 x key_conflict" in capsys.readouterr().out


async def test_our_ledger_needs_no_model_server(
    gym: GymModelServer, proxy: EngineProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Gym wrote through our ledger is read from its store, when Gym has long ended."""
    run = Run(gym, tmp_path, "ledger")
    await run.record(proxy)
    ledger = GymLedger(f"file://{tmp_path}/ledger")
    for ident in run.ids:
        manifest = gym.manifest(ident)
        for record in manifest.records:
            commit = CaptureLedgerCommit(
                rollout_id=ident,
                record=record,
                staging_chain=(record.staging_key,),
                request_items=[],
                response_items=[],
            )
            await ledger.record(commit)
        for failure in manifest.failures:
            await ledger.record_failure(ident, failure.model_call_id, failure.reason)
    await ledger.close()
    where = ["--store", run.store_url, "--rollouts", str(run.rollouts), "--json"]
    verdicts = []
    for source in (["--gym", gym.url], ["--ledger", f"{tmp_path}/ledger"]):
        assert await asyncio.to_thread(collect.main, [*source, *where]) == 1
        report = json.loads(capsys.readouterr().out)["rollouts"]
        verdicts.append([(r["status"], r["reason"], r["calls"]) for r in report])
    assert verdicts[0] == verdicts[1]
    assert await asyncio.to_thread(collect.main, ["--ledger", f"{tmp_path}/none", *where]) == 1


async def test_what_is_wrong_with_the_command_publishes_nothing(
    gym: GymModelServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(gym, tmp_path, "wrong")
    open_store(run.store_url).close()
    assert await run.collect() == 2
    assert "cannot read the rollouts file" in capsys.readouterr().err
    run.rollouts.write_text("{}\n")
    assert await run.collect() == 1
    assert "rollouts.jsonl:1" in capsys.readouterr().err
    run.rollouts.write_text('{"_ng_rollout_id": "nobody"}\n')
    monkeypatch.setenv("WRONG_SECRET", "x")
    assert await run.collect("--control-token-env", "WRONG_SECRET") == 2
    assert await run.collect("--control-token-env", "NOT_SET") == 2
    dead = ["--gym", "http://127.0.0.1:9", "--store", run.store_url]
    status = await asyncio.to_thread(collect.main, [*dead, "--rollouts", str(run.rollouts)])
    assert status == 1
    assert "store_unavailable" in capsys.readouterr().err
    assert run.keys(TRAINING_PARTITION) == []
    assert await run.collect() == 1
    assert "1 x no_records" in capsys.readouterr().out
