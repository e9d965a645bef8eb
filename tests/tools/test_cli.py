"""The command itself: what it lists, how it refuses, and that it starts light."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.tools.stories import tell
from tokenplane.schemas.errors import ConfigError, StoreFullError
from tokenplane.tools import cli
from tokenplane.tools.command_frame import coded_errors
from tokenplane.tools.inspecting.command import SUBJECTS

HEAVY = "{'torch', 'megatron', 'transformers', 'openai', 'pyarrow'} & set(sys.modules)"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: tokenplane {name}" in shown
    assert "``tokenplane" not in shown


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_of_inspect_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", name, "--help"])
    assert stop.value.code == 0
    assert f"usage: tokenplane inspect {name}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    listed = capsys.readouterr().err
    for name, command in cli.COMMANDS.items():
        assert f"  {name} " in listed
        assert command.summary in listed


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["inspect"], ["replay"], ["audit"], ["export", "x"]]
)
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: tokenplane" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["audit", "s", "--trainer-version", "-3"], "expected 0 or more, got '-3'"),
        (["audit", "s", "--trainer-version", "v3"], "expected 0 or more, got 'v3'"),
        (["replay", "s", "r", "--logprobs", "7"], "expected above 0 and up to 1, got '7'"),
        (["replay", "s", "r", "--logprobs", "nan"], "expected above 0 and up to 1, got 'nan'"),
        (["replay", "s", "r", "--logprobs", "x"], "expected above 0 and up to 1, got 'x'"),
    ],
)
def test_a_wrong_number_says_what_was_expected(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tokenplane.tools import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_the_commands_does_not_import_the_engine() -> None:
    modules = ", ".join(command.module for command in cli.COMMANDS.values())
    heavy = {"torch", "megatron", "transformers"}
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ConfigError("odd", got=3), 2, "bad_config"),
        (StoreFullError("no room"), 1, "store_full"),
        (PermissionError("not yours"), 1, "os_error"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_one_line_with_their_code(
    error: BaseException, status: int, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @coded_errors("thing")
    def main(argv: list[str] | None = None) -> int:
        raise error

    assert main() == status
    line = capsys.readouterr().err
    assert line.startswith(f"tokenplane thing: {code}: ")
    assert line.count("\n") == 1


def test_a_defect_keeps_its_traceback() -> None:
    @coded_errors("thing")
    def main(argv: list[str] | None = None) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main()


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    """As in ``tokenplane replay … | head -1``."""
    story = tell(tmp_path / "store")
    story.store.close()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as broken:
        done = subprocess.run(
            [sys.executable, "-m", "tokenplane.tools.cli", "replay", story.url, "alpha"],
            stdout=broken,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.parametrize("store", ["nope", "memory:", "redis://[::1", "file:///a%00b", ""])
@pytest.mark.parametrize(
    "argv",
    [
        ["replay", "STORE", "alpha"],
        ["audit", "STORE", "--json"],
        ["verify", "STORE"],
        ["inspect", "store", "STORE"],
        ["inspect", "row", "STORE", "x"],
        ["export", "STORE", "out.parquet"],
        ["gc", "STORE", "--older-than", "1d"],
        ["collect", "--ledger", "STORE", "--store", "STORE", "--rollouts", "rollouts.jsonl"],
    ],
    ids=lambda argv: " ".join(argv[:2]).replace(" STORE", ""),
)
def test_a_store_that_is_not_there_is_one_line_and_is_not_made(
    argv: list[str],
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text('{"_ng_rollout_id": "alpha"}\n')
    status = cli.main([store if word == "STORE" else word for word in argv])
    shown = capsys.readouterr()
    assert status == (1 if store == "nope" else 2)
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    name = " ".join(argv[: 2 if argv[0] == "inspect" else 1])
    code = "unsupported_store" if store == "nope" else "bad_config"
    assert shown.err.startswith(f"tokenplane {name}: {code}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_a_closed_stdout_is_no_defect(told: Path) -> None:
    """As in ``tokenplane verify … >&-``: the exit status is all that is asked for."""
    command = f"{sys.executable} -m tokenplane.tools.cli verify {told}"
    for closed in (">&-", ">&- 2>&-"):
        shell = ["sh", "-c", f"{command} {closed}"]
        done = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    shell = ["sh", "-c", f"{command} >/dev/full"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tokenplane verify: os_error: ")
    assert done.stderr.count("\n") == 1


def test_the_console_script_is_this_command() -> None:
    module, _, function = "tokenplane.tools.cli:main".partition(":")
    assert getattr(import_module(module), function) is cli.main
    done = subprocess.run(
        [Path(sys.executable).with_name("tokenplane"), "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("tokenplane 0.")


def test_the_documentation_has_every_command() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in cli.COMMANDS if f"`{name}`" not in text] == []
    assert [
        name for name in SUBJECTS if f"`inspect {name} " not in text.replace("$ tokenplane ", "`")
    ] == []
