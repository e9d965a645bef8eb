"""The numbers of an audit: how old the weights behind a rollout's tokens were, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenplane.schemas.epochs import spans_epochs, staleness
from tokenplane.schemas.staged_row import Sampling
from tokenplane.tools.published_rows import check_published
from tokenplane.tools.replay_segments import SegmentTexts
from tokenplane.tools.rollout_view import CallView, RolloutView


@dataclass(frozen=True, slots=True)
class RolloutAudit:
    """One rollout in numbers. Token counts are of sampled tokens unless the name says otherwise."""

    rollout_id: str
    calls: int
    sampled_tokens: int
    carried_tokens: int
    trainable_tokens: int
    """In published rows; where none is published, on the way to the rollout's final call."""
    published: bool
    tokens_by_version: dict[int, int]
    mean_staleness: float | None
    """Versions behind the trainer, over sampled tokens; None without any."""
    max_staleness: int | None
    spanning_calls: int
    """Calls that lived under more than one weight version."""
    kv_stale_tokens: int
    """Sampled while the KV cache held entries of older weights than those that sampled."""
    kv_unknown_tokens: int
    """Of calls whose KV epochs were not recorded."""
    logprobs_modes: tuple[str, ...]
    sampling: tuple[str, ...]
    """Every distinct way of sampling; more than one is drift within the rollout."""
    prefix_sources: dict[str, int]
    splice_notes: dict[str, int]
    failures: dict[str, int]
    """Calls served without capture, by code."""
    problems: dict[str, int] = field(default_factory=dict)
    """Rows that do not verify, by code."""
    continuations: int = 0
    """Calls that continue another one."""
    splits_avoided: int | None = None
    """Continuations of an answer whose text encodes to other ids than were sampled: a history sent
    as text would have been cut there. None where the tokenizer is not at hand."""

    @property
    def verified(self) -> bool:
        """True if every row verifies."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Audit:
    """All audited rollouts, against one version of the trainer."""

    trainer_version: int | None
    """None where no token was sampled at all."""
    rollouts: tuple[RolloutAudit, ...]
    staleness: dict[int, int]
    """Sampled tokens by versions behind the trainer."""


def newest_version(rollouts: Sequence[RolloutView]) -> int | None:
    """The newest version that sampled anything; None if nothing was sampled."""
    return max((int(c.versions().max()) for r in rollouts for c in r.calls), default=None)


def audit(
    rollouts: Sequence[RolloutView],
    trainer_version: int | None = None,
    *,
    texts: SegmentTexts | None = None,
) -> Audit:
    """The audit of these rollouts.

    Args:
        trainer_version: what tokens are compared with; None takes the newest version seen.
        texts: the store's tokenizers; without them no re-encoding is tried.
    """
    version = newest_version(rollouts) if trainer_version is None else trainer_version
    audits = tuple(audit_rollout(rollout, version, texts=texts) for rollout in rollouts)
    total: Counter[int] = Counter()
    for one in audits:
        for sampled_by, count in one.tokens_by_version.items():
            total[(version or 0) - sampled_by] += count
    return Audit(version, audits, dict(sorted(total.items())))


def audit_rollout(
    rollout: RolloutView, trainer_version: int | None, *, texts: SegmentTexts | None = None
) -> RolloutAudit:
    """The numbers of one rollout."""
    versions = _joined([call.versions() for call in rollout.calls])
    kv = _joined([call.oldest_kv() for call in rollout.calls])
    behind = staleness(versions, trainer_version or 0)
    evidence = [call.row.evidence for call in rollout.calls]
    problems = [*rollout.problems, *check_published(rollout)]
    return RolloutAudit(
        rollout_id=rollout.rollout_id,
        calls=len(rollout.calls),
        sampled_tokens=len(versions),
        carried_tokens=sum(call.row.call.carry_len for call in rollout.calls),
        trainable_tokens=_trainable(rollout),
        published=bool(rollout.training),
        tokens_by_version=_counts(versions.tolist()),
        mean_staleness=float(behind.mean()) if len(behind) else None,
        max_staleness=int(behind.max()) if len(behind) else None,
        spanning_calls=sum(spans_epochs(e.policy_epochs) for e in evidence),
        kv_stale_tokens=int(np.count_nonzero((kv >= 0) & (kv < versions))),
        kv_unknown_tokens=int(np.count_nonzero(kv < 0)),
        logprobs_modes=tuple(sorted({e.logprobs_mode or "unknown" for e in evidence})),
        sampling=tuple(sorted({_sampling(e.sampling) for e in evidence})),
        prefix_sources=_counts(e.prefix_source or "unknown" for e in evidence),
        splice_notes=_counts(note for e in evidence for note in e.splice_notes),
        failures=_counts(failure.code for failure in rollout.failures),
        problems=_counts(problem.code for problem in problems),
        continuations=sum(call.parent is not None for call in rollout.calls),
        splits_avoided=_splits_avoided(rollout, texts),
    )


def _splits_avoided(rollout: RolloutView, texts: SegmentTexts | None) -> int | None:
    survives: dict[str, bool] = {}
    avoided = 0
    for parent in (call.parent for call in rollout.calls if call.parent is not None):
        key = parent.row.staging_key
        if key not in survives:
            fingerprint = parent.row.evidence.tokenizer_fingerprint
            decoder = None if texts is None else texts.decoder(fingerprint)
            if decoder is None:
                return None
            sampled = parent.token_ids[-parent.row.call.generation_len :]
            survives[key] = decoder.survives(sampled.tolist())
        avoided += not survives[key]
    return avoided


def _counts[K: (int, str)](values: Iterable[K]) -> dict[K, int]:
    return dict(sorted(Counter(values).items()))


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _trainable(rollout: RolloutView) -> int:
    if rollout.training:
        return sum(row.trainable_tokens for row in rollout.training if not row.salvaged)
    chain: Sequence[CallView] = rollout.terminal_calls()
    return sum(call.row.call.generation_len for call in chain)


def _sampling(sampling: Sampling | None) -> str:
    """What shapes the distribution; the seed and the token limit do not."""
    if sampling is None:
        return "not recorded"
    parts = [f"temperature {sampling.temperature:g}"]
    if sampling.top_k:
        parts.append(f"top_k {sampling.top_k}")
    if sampling.top_p != 1:
        parts.append(f"top_p {sampling.top_p:g}")
    if sampling.ignore_eos:
        parts.append("ignore_eos")
    return ", ".join(parts)
