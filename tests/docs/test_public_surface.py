"""The public names: each is imported from the path that is promised, and takes what is promised."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

SURFACE: dict[str, tuple[str, ...]] = {
    "tokenplane.staging": ("open_store", "TokenSink", "TokenSource", "StagingStore"),
    "tokenplane.capture": (
        "PrefixResolver",
        "TQMegatronPromptPreparer",
        "TQMegatronTokenStager",
        "RolloutTokenCapture",
        "Ledger",
        "Collector",
        "verify_and_linearize",
    ),
    "tokenplane.schemas": (
        "CaptureAdmission",
        "CommitCoords",
        "StagedCallRecord",
        "StagedCallBaseSnapshot",
        "StagedCallSnapshot",
        "StageResult",
        "CallRecord",
        "CaptureLedgerCommit",
        "ManifestFailure",
        "RolloutManifest",
        "RolloutReceipt",
        "StagedCall",
        "StagedRow",
        "TrainingRow",
        "TokenplaneError",
    ),
    "tokenplane.engine_adapter": ("MegatronGenerationWorker",),
}
"""By the package that a user imports from."""

SIGNATURES: dict[str, tuple[str, ...]] = {
    "tokenplane.staging.open_store": ("url",),
    "tokenplane.staging.TokenSink": ("store", "partition"),
    "tokenplane.staging.TokenSink.stage": ("self", "record", "*attachments"),
    "tokenplane.staging.TokenSource": ("store", "partition"),
    "tokenplane.staging.TokenSource.fetch": ("self", "keys"),
    "tokenplane.staging.TokenSource.fetch_prefix": ("self", "keys"),
    "tokenplane.capture.PrefixResolver": ("source", "max_bytes"),
    "tokenplane.capture.TQMegatronPromptPreparer": ("source",),
    "tokenplane.capture.TQMegatronPromptPreparer.prepare_prompt": (
        "self",
        "prompt",
        "*offload_params",
    ),
    "tokenplane.capture.TQMegatronTokenStager": ("sink",),
    "tokenplane.capture.TQMegatronTokenStager.stage": (
        "self",
        "uid",
        "payload",
        "*finished_metadata",
        "*offload_params",
    ),
    "tokenplane.capture.RolloutTokenCapture": ("*sink", "*weight_version_fn"),
    "tokenplane.capture.RolloutTokenCapture.begin_call": ("self", "admission"),
    "tokenplane.capture.RolloutTokenCapture.complete_call": ("self", "call"),
    "tokenplane.capture.RolloutTokenCapture.fail_call": ("self", "call", "*reason"),
    "tokenplane.capture.Ledger": ("store",),
    "tokenplane.capture.Collector": ("source", "manifests"),
    "tokenplane.capture.Collector.finalize": ("self", "rollout"),
    "tokenplane.capture.Collector.finalize_group": ("self", "rollouts"),
    "tokenplane.capture.verify_and_linearize": ("receipt", "snapshots"),
}
"""The first parameters; ``*name`` is one that is passed by keyword only."""


@pytest.mark.parametrize("package", SURFACE)
def test_every_public_name_is_where_it_is_promised(package: str) -> None:
    module = import_module(package)
    missing = [name for name in SURFACE[package] if not hasattr(module, name)]
    assert missing == []


def test_a_statement_of_imports_works_in_a_fresh_process() -> None:
    """As a user writes it; nothing that another test imported helps."""
    lines = [f"from {package} import {', '.join(names)}" for package, names in SURFACE.items()]
    code = "\n".join([*lines, "print(MegatronGenerationWorker.__name__)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "MegatronGenerationWorker"


def test_the_worker_costs_nothing_until_it_is_asked_for() -> None:
    code = (
        "import sys, tokenplane.engine_adapter as e\n"
        "print('torch' in sys.modules, 'MegatronGenerationWorker' in dir(e))\n"
        "try: e.Nothing\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "False True"
    assert "Nothing" in second


@pytest.mark.parametrize("path", SIGNATURES)
def test_every_public_call_takes_what_is_promised(path: str) -> None:
    package = next(name for name in SURFACE if path.startswith(f"{name}."))
    found: Any = import_module(package)
    for name in path.removeprefix(f"{package}.").split("."):
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters.values()
    shown = [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in parameters]
    positional = [name for name in SIGNATURES[path] if not name.startswith("*")]
    assert shown[: len(positional)] == positional
    assert set(SIGNATURES[path]) <= set(shown)


def test_a_memory_url_opens_a_new_private_store_each_time() -> None:
    from tokenplane.staging import open_store

    with open_store("memory:") as one, open_store("memory:") as other:
        assert one is not other


def test_the_epoch_span_count_is_a_property_of_the_stager() -> None:
    from tokenplane.capture import TQMegatronTokenStager

    assert isinstance(inspect.getattr_static(TQMegatronTokenStager, "epoch_span_count"), property)
