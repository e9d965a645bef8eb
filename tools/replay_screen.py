"""A rollout on the screen: the tree of its calls, then turn by turn what was given and sampled."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tokenplane.tools.replay_segments import Segment, SegmentTexts, segments_of
from tokenplane.tools.rollout_view import CallView, RolloutView

GUTTERS = {"given": "|", "sampled": ">"}
_STYLES = {"given": "dim", "sampled": "bold green"}
_SELECTED = {
    "published": "as in the published training row",
    "selected": "found by descent from the first root; nothing declared it",
}
_IDS_A_LINE = 16
# A sampled text may hold escape sequences; a terminal must not obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ReplayScreen:
    """Prints rollouts. ``console`` is stdout; without a terminal, markers stand in for colours.

    Args:
        ids: token ids instead of text.
        min_probability: mark sampled tokens that were less likely than this; None marks none.
    """

    def __init__(
        self,
        console: Console,
        texts: SegmentTexts,
        *,
        ids: bool = False,
        min_probability: float | None = None,
    ) -> None:
        self._console = console
        self._texts = texts
        self._ids = ids
        self._min_probability = min_probability

    def show(self, rollout: RolloutView) -> None:
        """Print one rollout."""
        chain = {call.row.staging_key for call in rollout.terminal_calls()}
        self._summary(rollout, chain)
        roots = rollout.children()[None]
        if len(chain) < len(rollout.calls) or len(roots) > 1:
            self._tree(rollout, chain)
        for call in rollout.calls:
            self._call(call, on_chain=call.row.staging_key in chain)
        for note in self._texts.notes:
            self._line(f"note: {note}", "yellow")
        self._texts.notes.clear()

    def _summary(self, rollout: RolloutView, chain: set[str]) -> None:
        calls = len(rollout.calls)
        state = "every row verified" if rollout.verified else "NOT VERIFIED, see below"
        self._line(f"rollout {rollout.rollout_id}", "bold")
        self._line(f"  {_count(calls, 'model call')}, {state}")
        choice = rollout.terminal()
        if choice.model_call_id is None:
            self._line(f"  no final call: {choice.reason}", "yellow")
        else:
            how = _SELECTED.get(choice.reason, choice.reason)
            self._line(f"  final call {_short(choice.model_call_id)} ({how})")
        for row in rollout.training:
            reward = "none" if row.reward is None else f"{row.reward:g}"
            what = (
                f"{len(row.token_ids)} tokens, {row.trainable_tokens} of them trained on, "
                f"sampled by weights {_range(row.min_weight_version, row.max_weight_version)}"
                if row.sample_mask
                else f"placeholder, trains on nothing: {row.reason}"
            )
            self._line(f"  training row {row.row_id}: {what}, reward {reward}")
        if not rollout.training:
            self._line("  no training row published yet")
        for problem in rollout.problems:
            self._line(f"  BAD {problem.key}: {problem.code}: {problem.message}", "bold red")
        for failure in rollout.failures:
            self._line(
                f"  not captured: call {_short(failure.model_call_id)}: "
                f"{failure.code}: {failure.message}",
                "yellow",
            )
        if rollout.calls:
            self._line("")
            for kind, meaning in (
                ("given", "given to the model: context, no loss"),
                ("sampled", "sampled by the model, token by token"),
            ):
                self._line(f"  {GUTTERS[kind]} {meaning}", _STYLES[kind])

    def _tree(self, rollout: RolloutView, chain: set[str]) -> None:
        self._line("")
        self._line("how the calls continue each other (* leads to the final call)")
        children = rollout.children()

        def walk(call: CallView, indent: str) -> Iterator[str]:
            mark = "*" if call.row.staging_key in chain else " "
            yield f"  {mark} {indent}turn {call.turn}, call {_short(call.call_id)}"
            for child in children.get(call, []):
                yield from walk(child, indent + "   ")

        for root in children[None]:
            for line in walk(root, ""):
                self._line(line)

    def _call(self, call: CallView, *, on_chain: bool) -> None:
        staged, evidence = call.row.call, call.row.evidence
        origin = (
            "starts the rollout"
            if call.parent is None
            else f"continues {_short(call.parent.call_id)}"
        )
        aside = "" if on_chain else ", not on the way to the final call"
        self._line("")
        self._line(
            f"turn {call.turn}, call {_short(call.call_id)} ({origin}{aside})", "bold underline"
        )
        versions = call.versions()
        facts = [
            f"weights {_range(int(versions.min()), int(versions.max()))}",
            f"{staged.prev_len} tokens carried over",
            f"{staged.carry_len} new",
            f"{staged.generation_len} sampled",
        ]
        if evidence.finish_reason is not None:
            facts.append(f"ended by {evidence.finish_reason}")
        if evidence.prefix_source not in (None, "root"):
            facts.append(f"prefix from {evidence.prefix_source}")
        if evidence.sampling is not None:
            facts.append(f"temperature {evidence.sampling.temperature:g}")
        if evidence.num_evictions:
            facts.append(f"KV cache dropped {evidence.num_evictions} times")
        self._line(f"  {', '.join(facts)}")
        if evidence.splice_notes:
            self._line(f"  splice: {', '.join(evidence.splice_notes)}")
        last_version: int | None = None
        for segment in segments_of(call):
            version = segment.weight_version
            if last_version is not None and version != last_version:
                self._line(f"  ~ weights v{version} from here on", "cyan")
            last_version = version
            self._segment(call, segment)

    def _segment(self, call: CallView, segment: Segment) -> None:
        style, gutter = _STYLES[segment.kind], f"  {GUTTERS[segment.kind]} "
        for line in self._body(call, segment).split("\n", allow_blank=False):
            shown = Text(gutter, style=style)
            shown.append_text(line)
            self._console.print(shown, soft_wrap=True)

    def _body(self, call: CallView, segment: Segment) -> Text:
        style = _STYLES[segment.kind]
        marked = self._min_probability
        if not self._ids and segment.kind == "sampled" and marked is not None:
            pieces = self._texts.pieces(call, segment)
            if pieces is not None:
                return _with_marks(pieces, marked, style)
        text = None if self._ids else self._texts.text(call, segment)
        if text is None:
            ids = segment.token_ids.tolist()
            lines = [ids[at : at + _IDS_A_LINE] for at in range(0, len(ids), _IDS_A_LINE)]
            text = "\n".join(" ".join(map(str, line)) for line in lines)
        return Text(printable(text), style=style)

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(printable(text), style=style), soft_wrap=True)


def printable(text: str) -> str:
    """``text`` with control characters spelled out, line feeds and tabs kept."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _with_marks(pieces: Iterator[tuple[str, float]], least: float, style: str) -> Text:
    """Unlikely tokens in brackets, with their probability."""
    body = Text(style=style)
    for text, log_prob in pieces:
        probability = math.exp(log_prob)
        if probability >= least:
            body.append(printable(text))
        else:
            body.append(f"⟦{printable(text)} {probability:.1%}⟧", style="bold red")
    return body


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _range(low: int, high: int) -> str:
    return f"v{low}" if low == high else f"v{low} to v{high}"


def _short(ident: str) -> str:
    """The first characters of a long id; enough to name a call to ``inspect row``."""
    return ident if len(ident) <= 12 else ident[:8]
