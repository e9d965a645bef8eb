"""``tokenplane replay``: a rollout turn by turn as the model saw it, re-verified; or a check."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenplane.schemas.errors import MissingRowError
from tokenplane.tools.command_frame import coded_errors, command_parser
from tokenplane.tools.exit_status import EXIT_FAILED

if TYPE_CHECKING:
    from tokenplane.staging.store import StagingStore
    from tokenplane.tools.replay_segments import SegmentTexts
    from tokenplane.tools.rollout_view import CallView, RolloutView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show, and how."""
    parser.add_argument("store", help="store URL or folder")
    parser.add_argument("rollouts", nargs="*", metavar="ROLLOUT", help="rollout id")
    parser.add_argument("--ids", action="store_true", help="show token ids instead of text")
    parser.add_argument(
        "--logprobs",
        nargs="?",
        type=_probability,
        const=0.1,
        metavar="P",
        help="mark sampled tokens that were less likely than P (0.1 unless given)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="show nothing: make every published row anew from its staged rows and compare, "
        "bit for bit (of the rollouts named, or of all)",
    )
    parser.add_argument(
        "--parquet",
        type=Path,
        metavar="FILE",
        help="with --check: the export must hold exactly the published rows, too",
    )


@coded_errors("replay")
def main(argv: list[str] | None = None) -> int:
    """0: shown and verified, or identical; 1: something does not verify, or is not there."""
    parser = command_parser("replay", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if not args.check and not args.rollouts:
        parser.error("name a rollout (`tokenplane audit STORE` lists them), or use --check")
    if args.parquet is not None and not args.check:
        parser.error("--parquet goes with --check")
    from tokenplane.tools.store_reading import open_for_reading

    with open_for_reading(args.store) as store:
        return _check(store, args) if args.check else _show(store, args)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected above 0 and up to 1, got {text!r}")
    return value


def _check(store: StagingStore, args: argparse.Namespace) -> int:
    from tokenplane.tools.store_reading import find_rollout, find_rollouts
    from tokenplane.tools.verify import verify

    found = (
        {name: find_rollout(store, name) for name in args.rollouts}
        if args.rollouts
        else find_rollouts(store)
    )
    report = verify(store, found.items(), parquet=args.parquet)
    if not report.published and not report.problems:
        raise MissingRowError("no published row to check", code="nothing_published", key=args.store)
    if report.cleaned:
        raise MissingRowError(
            "published rows whose staged rows were removed cannot be replayed",
            code="staged_rows_removed",
            got=report.cleaned,
        )
    identical = not report.problems
    if args.json:
        print(json.dumps(asdict(report) | {"identical": identical}, indent=2))
    else:
        for problem in report.problems:
            print(f"BAD {problem.partition} {problem.key}: {problem.code}: {problem.message}")
        against = "" if args.parquet is None else f" and {args.parquet}"
        print(
            f"{report.published} published rows{against}: "
            f"{'identical' if identical else 'NOT identical'} to their replay "
            f"from {report.staged} staged rows"
        )
    return 0 if identical else EXIT_FAILED


def _show(store: StagingStore, args: argparse.Namespace) -> int:
    from tokenplane.tools.replay_screen import ReplayScreen
    from tokenplane.tools.replay_segments import SegmentTexts
    from tokenplane.tools.rollout_view import load_rollout
    from tokenplane.tools.store_reading import find_rollout
    from tokenplane.tools.wide_console import open_console

    views = [load_rollout(store, name, find_rollout(store, name)) for name in args.rollouts]
    texts = SegmentTexts(store)
    if args.json:
        shown = [to_json(view, texts, ids=args.ids) for view in views]
        print(json.dumps({"rollouts": shown, "notes": texts.notes}, indent=2, ensure_ascii=False))
    else:
        console = open_console()
        screen = ReplayScreen(console, texts, ids=args.ids, min_probability=args.logprobs)
        for at, view in enumerate(views):
            if at:
                console.print()
            screen.show(view)
    sys.stdout.flush()
    return 0 if all(view.verified for view in views) else EXIT_FAILED


def to_json(rollout: RolloutView, texts: SegmentTexts, *, ids: bool) -> dict[str, Any]:
    """One rollout as JSON values; token ids and log-probabilities only if ``ids``."""
    return {
        "rollout_id": rollout.rollout_id,
        "verified": rollout.verified,
        "terminal_model_call_id": rollout.terminal().model_call_id,
        "terminal_reason": rollout.terminal().reason,
        "calls": [_call_json(call, texts, ids=ids) for call in rollout.calls],
        "training_rows": [
            {
                "row_id": row.row_id,
                "tokens": len(row.token_ids),
                "trainable_tokens": row.trainable_tokens,
                "min_weight_version": row.min_weight_version,
                "max_weight_version": row.max_weight_version,
                "reward": row.reward,
                "sample_mask": row.sample_mask,
                "reason": row.reason,
            }
            for row in rollout.training
        ],
        "failures": [asdict(failure) for failure in rollout.failures],
        "problems": [asdict(problem) for problem in rollout.problems],
    }


def _call_json(call: CallView, texts: SegmentTexts, *, ids: bool) -> dict[str, Any]:
    from tokenplane.tools.replay_segments import segments_of

    staged, evidence = call.row.call, call.row.evidence
    segments = []
    for segment in segments_of(call):
        shown: dict[str, Any] = {
            "kind": segment.kind,
            "tokens": len(segment.token_ids),
            "weight_version": segment.weight_version,
            "text": texts.text(call, segment),
        }
        if ids:
            shown["token_ids"] = segment.token_ids.tolist()
            if segment.kind == "sampled":
                shown["log_probs"] = segment.log_probs.tolist()
        segments.append(shown)
    return {
        "turn": call.turn,
        "staging_key": call.row.staging_key,
        "model_call_id": call.call_id,
        "parent_call_id": staged.parent_call_id,
        "response_id": None if call.row.ledger is None else call.row.ledger.response_id,
        "prev_len": staged.prev_len,
        "carried": staged.carry_len,
        "sampled": staged.generation_len,
        "policy_epochs": [list(boundary) for boundary in evidence.policy_epochs],
        "finish_reason": evidence.finish_reason,
        "prefix_source": evidence.prefix_source,
        "splice_notes": list(evidence.splice_notes),
        "segments": segments,
    }


if __name__ == "__main__":
    raise SystemExit(main())
