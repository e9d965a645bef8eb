"""``tokenplane inspect row`` and ``inspect store``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.stories import Story
from tokenplane.schemas.staged_row import STAGED_COLUMNS
from tokenplane.schemas.training_row import TRAINING_COLUMNS
from tokenplane.staging import open_store
from tokenplane.tools.cli import main
from tokenplane.tools.inspecting.row import shown

Capture = pytest.CaptureFixture[str]


def test_every_column_is_there_with_its_meaning(told: Path, capsys: Capture) -> None:
    assert main(["inspect", "row", str(told), "gamma/"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for column in STAGED_COLUMNS:
        assert column.name in text
        assert column.doc in text


def test_rows_of_other_partitions(told: Path, capsys: Capture) -> None:
    assert main(["inspect", "row", str(told), "alpha", "--partition", "rows"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(column.doc in text for column in TRAINING_COLUMNS)
    assert main(["inspect", "row", str(told), "gamma", "--partition", "failures"]) == 0
    assert "unresolved_parent" in capsys.readouterr().out
    assert main(["inspect", "row", str(told), "tokenizer", "--partition", "artifacts"]) == 0
    assert "a tokenizer.json for a tokenizer" in capsys.readouterr().out


def test_json_is_complete(told: Path, capsys: Capture) -> None:
    assert main(["inspect", "row", str(told), "gamma/", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values) == [column.name for column in STAGED_COLUMNS]
    assert len(values["token_ids_delta"]) == values["delta_len"] == 19
    assert len(values["digest"]) == 64
    assert json.loads(values["response_body"])["id"] == values["response_id"]


def test_a_call_id_is_enough(told: Path, capsys: Capture) -> None:
    with open_store(str(told)) as store:
        key = store.keys("staged", "beta/")[1]
    for wanted in (key, key.split("/")[1], key.split("/")[1][:8]):
        assert main(["inspect", "row", str(told), wanted, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["staging_key"] == key


def test_an_ambiguous_or_unknown_key_is_one_line(told: Path, capsys: Capture) -> None:
    assert main(["inspect", "row", str(told), "alpha"]) == 1
    said = capsys.readouterr().err
    assert "ambiguous_key: 3 rows of partition 'staged' fit; expected one of alpha/" in said
    assert main(["inspect", "row", str(told), "zeta"]) == 1
    assert "missing_row: no row of partition 'staged' has this key" in capsys.readouterr().err


def test_long_values_are_shortened_unless_full() -> None:
    numbers = list(range(100))
    assert shown(numbers, full=False) == (
        "0, 1, 2, 3, 4, 5, 6, 7, …, 92, 93, 94, 95, 96, 97, 98, 99 (100 in all)"
    )
    assert shown(numbers, full=True) == json.dumps(numbers)
    assert shown("x" * 500, full=False) == "x" * 160 + "… (500 characters)"
    assert shown([0.125] * 17, full=False).startswith("0.125, ")
    assert shown(None, full=False) == "-"


def test_a_store_by_partition(story: Story, capsys: Capture) -> None:
    claimed = story.store.claim("rows", "trainer", max_rows=1, lease_s=60)
    story.store.ack("rows", "trainer", [claimed[0].key])
    assert main(["inspect", "store", story.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: part["rows"] for name, part in found["partitions"].items()} == {
        "artifacts": 1,
        "failures": 1,
        "rows": 2,
        "staged": 8,
    }
    assert found["partitions"]["rows"]["backlog"] == {"trainer": 1}
    assert found["rows"] == 12
    assert main(["inspect", "store", story.url]) == 0
    text = capsys.readouterr().out
    assert "trainer: 1" in text
    assert "survives a power cut" in text


def test_a_budget_is_shown(story: Story, capsys: Capture) -> None:
    story.store.close()
    url = f"{story.path.as_uri()}?max_bytes=100000000"
    assert main(["inspect", "store", url]) == 0
    assert "budget 100.0 MB, used " in capsys.readouterr().out
