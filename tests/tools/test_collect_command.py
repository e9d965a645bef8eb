"""``tokenplane collect`` over our own ledger: what it shows, and what it says of a clean-up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.capture.rollouts import RolloutMaker
from tests.capture.test_collector import record_of
from tokenplane.capture.gym_ledger import GymLedger
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.manifest import CaptureLedgerCommit
from tokenplane.schemas.staged_row import STAGED_PARTITION
from tokenplane.schemas.training_row import TRAINING_PARTITION
from tokenplane.staging import TokenSink, open_store
from tokenplane.staging.rollout_hold import RolloutHold
from tokenplane.tools.cli import main

Capture = pytest.CaptureFixture[str]
ROLLOUTS = ("0-0", "0-1")


class Run:
    """Two rollouts of two calls each, their ledger in the same store, and a third that is lost."""

    def __init__(self, folder: Path) -> None:
        self.store = f"file://{folder}/store?durability=process"
        self.rollouts = folder / "rollouts.jsonl"
        self.keep(*ROLLOUTS, "0-2")
        with open_store(self.store) as store:
            for name in ROLLOUTS:
                maker = RolloutMaker(TQMegatronTokenStager(TokenSink(store)), name)
                root = maker.stage()[1]
                for call in (root, maker.stage(root)[1]):
                    commit = CaptureLedgerCommit(
                        rollout_id=name,
                        record=record_of(call),
                        staging_chain=tuple(call.chain),
                        request_items=[],
                        response_items=[],
                    )
                    asyncio.run(GymLedger(store).record(commit))

    def keep(self, *rollouts: str, reward: float = 1.0) -> None:
        """The rollouts file names these."""
        records = [{"_ng_rollout_id": name, "reward": reward} for name in rollouts]
        self.rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def collect(self, *flags: str, ledger: bool = True) -> int:
        manifests = ["--ledger", self.store] if ledger else []
        where = ["--store", self.store, "--rollouts", str(self.rollouts)]
        return main(["collect", *manifests, *where, *flags])

    def keys(self, partition: str) -> list[str]:
        with open_store(f"{self.store}&mode=ro") as store:
            return store.keys(partition)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_people_and_the_reasons_are_counted(
    run: Run, terminal: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar on a terminal's stderr, nothing there in a pipe; the table is on stdout always."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    assert run.collect("--salvage") == 1
    shown = capsys.readouterr()
    assert ("collecting" in shown.err) == terminal
    assert "2 of 3 rollouts have a verified row" in shown.out
    assert "1 x no_records" in shown.out
    assert [line.split()[1] for line in shown.out.splitlines() if line.startswith("0-")] == [
        *("verified", "verified", "placeholder")
    ]


def test_a_clean_up_that_cannot_be_is_reported_and_comes_later(run: Run, capsys: Capture) -> None:
    """Another reader holds one rollout's rows: its row is published all the same."""
    with open_store(run.store) as store, RolloutHold(store, STAGED_PARTITION, ["0-1"]):
        assert run.collect("--clean") == 1
    assert "not cleaned: 0-1: row_held" in capsys.readouterr().err
    assert run.keys(TRAINING_PARTITION) == ["0-0", "0-1", "0-2"]
    assert {key.partition("/")[0] for key in run.keys(STAGED_PARTITION)} == {"0-1"}
    assert run.collect("--clean", "--json") == 1
    report = json.loads(capsys.readouterr().out)["rollouts"]
    assert [(r["published"], r["cleaned"], r["clean_error"]) for r in report] == [
        *((0, 0, None), (0, 2, None), (0, 0, None))
    ]
    assert run.keys(STAGED_PARTITION) == []


def test_a_cleaned_run_is_collected_again_without_a_warning(
    run: Run, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    """What was removed on purpose is no damage; another reward than the published one still is."""
    run.keep(*ROLLOUTS)
    assert run.collect("--clean") == 0
    first = run.keys(TRAINING_PARTITION)
    for flags in (["--clean"], ["--segments", "all"], ["--strictness", "gym", "--salvage"]):
        assert run.collect(*flags) == 0
        assert "2 of 2 rollouts have a verified row" in capsys.readouterr().out
    assert caplog.messages == []
    assert run.keys(TRAINING_PARTITION) == first
    run.keep(*ROLLOUTS, reward=0.5)
    assert run.collect() == 1
    assert "2 x key_conflict" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        *(["--gym", "http://127.0.0.1:9", "--timeout-s", text] for text in ("-1", "nan", "inf")),
        *(["--gym", url] for url in ("", "127.0.0.1:9", "http://[::1")),
    ],
    ids=str,
)
def test_a_wrong_setting_publishes_nothing(
    run: Run, flags: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_TOKEN_CAPTURE_CONTROL_TOKEN", "secret")
    assert run.collect(*flags, ledger=False) == 2
    assert "bad_config" in capsys.readouterr().err
    assert run.keys(TRAINING_PARTITION) == []
    assert run.collect() == 1
    assert "2 of 3 rollouts have a verified row" in capsys.readouterr().out
