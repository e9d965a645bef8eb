"""``tokenplane verify contract``: the installed NeMo-Gym agrees; a changed one is found out."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tokenplane.tools import cli
from tokenplane.tools.contract_answers import answer
from tokenplane.tools.contract_questions import examples, questions
from tokenplane.tools.verify_contract import compare


@pytest.fixture(scope="module")
def site_packages(gym_python: Path) -> Path:
    (found,) = (gym_python.parents[1] / "lib").glob("python3.*/site-packages")
    return found


def test_everything_is_equal(site_packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "contract", "--gym-source", str(site_packages)]) == 0
    shown = capsys.readouterr().out
    assert "nemo-gym 0.7.0: all" in shown
    assert "answers are equal" in shown


def test_the_package_folder_and_another_interpreter_do_too(
    site_packages: Path, gym_python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(site_packages / "nemo_gym")
    argv = ["verify", "contract", "--gym-source", source, "--python", str(gym_python), "--json"]
    assert cli.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["gym"], report["equal"]) == ("0.7.0", True)
    checks = {check["name"]: check for check in report["checks"]}
    assert {f"model {name}" for name in examples()} < set(checks)
    assert all(0 < check["accepted"] <= check["asked"] for check in checks.values())


@pytest.mark.parametrize(
    ("file", "old", "new", "check"),
    [
        (
            "staging/digest.py",
            "nemo-gym-staging-chain-v1",
            "nemo-gym-staging-chain-v3",
            "chain_hash",
        ),
        ("staging/records.py", "class ManifestFailure(", "", "model ManifestFailure"),
    ],
)
def test_a_changed_gym_is_found_out(
    file: str,
    old: str,
    new: str,
    check: str,
    site_packages: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "nemo_gym"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(site_packages / "nemo_gym", package, ignore=ignored)
    changed = package / "token_id_capture" / file
    text = changed.read_text()
    assert old in text
    if new:
        changed.write_text(text.replace(old, new))
    else:
        # A field more, as a newer version could have it.
        head, _, tail = text.partition(old)
        body = tail.index("    reason:")
        changed.write_text(head + old + tail[:body] + "    hint: str\n" + tail[body:])
    assert cli.main(["verify", "contract", "--gym-source", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"DIFFERENT {check} " in shown
    assert "answers differ" in shown


@pytest.mark.parametrize("flags", [[], ["--python", "/nowhere/python"]])
def test_no_gym_or_no_interpreter_is_wrong_usage(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags:
        (tmp_path / "nemo_gym" / "token_id_capture").mkdir(parents=True)
    assert cli.main(["verify", "contract", "--gym-source", str(tmp_path), *flags]) == 2
    assert "tokenplane verify contract: bad_config" in capsys.readouterr().err


def test_gyms_code_that_does_not_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nemo_gym" / "token_id_capture").mkdir(parents=True)
    argv = ["verify", "contract", "--gym-source", str(tmp_path), "--python", sys.executable]
    assert cli.main(argv) == 2
    assert "does not run: ModuleNotFoundError" in capsys.readouterr().err


def test_a_single_bit_is_a_difference() -> None:
    asked = [question for question in questions() if question[0] == "extras_digest"]
    said = [answer(*question) for question in asked]
    assert not any(check.differences for check in compare(asked, said))
    (check,) = compare(asked, [{"value": 0.0} if "value" in one else one for one in said])
    assert len(check.differences) == sum("value" in one for one in said)
