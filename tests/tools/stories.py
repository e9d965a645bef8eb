"""Rollouts in a file store, made with the real ledger, resolver, stager and collector."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tokenplane.capture import Collector, Ledger, PrefixResolver, TQMegatronTokenStager
from tokenplane.capture.collect.training_rows import RolloutOutcome
from tokenplane.capture.failures import CaptureFailure
from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    CONTEXT_KEY,
    CallContext,
    FinishedRequestRecord,
    OffloadedRequestPayload,
)
from tokenplane.capture.ledger import LedgerRequest
from tokenplane.engine_adapter.tokenizer_artifact import store_tokenizer
from tokenplane.schemas.staged_row import CallEvidence, Sampling
from tokenplane.staging import TokenSink, TokenSource, open_store

END = "<|end|>"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """One token per byte, and an end token."""
    symbols = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def encode(text: str) -> np.ndarray:
    return np.array(byte_tokenizer().encode(text).ids, np.int32)


@dataclass
class Story:
    """A store that is written by one engine with a byte tokenizer."""

    path: Path
    tokenizer_fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.store = open_store(f"{self.path.as_uri()}?durability=process")
        self.tokenizer_fingerprint = store_tokenizer(
            self.store, SimpleNamespace(backend_tokenizer=byte_tokenizer())
        )
        self.source = TokenSource(self.store)
        self.ledger = Ledger(self.store)
        self.resolver = PrefixResolver(self.source)
        self.stager = TQMegatronTokenStager(TokenSink(self.store), resolver=self.resolver)
        self.rng = np.random.default_rng(3)

    @property
    def url(self) -> str:
        return str(self.path)

    def call(
        self,
        rollout: str,
        messages: list[dict[str, Any]],
        reply: str,
        *,
        epochs: list[tuple[int, int]] | None = None,
        new_epoch_at: int | None = None,
        temperature: float = 1.0,
        fingerprint: str | None = "",
        log_probs: list[float] | None = None,
        sampled_ids: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        """One model call that says ``reply``; gives the conversation with the answer.

        ``new_epoch_at``: weights v1 from that sampled token on. ``sampled_ids``: what was sampled,
        if it is not what the reply encodes to.
        """
        decision = self.ledger.admit(LedgerRequest(rollout, messages))
        assert decision.admission is not None, decision.reason
        prefix = self.resolver.resolve(decision.admission).token_ids
        fresh = encode("".join(f"{m['role']}: {m['content']}\n" for m in messages[-1:]))
        prompt = np.concatenate([prefix, fresh])
        sampled = encode(reply + END)
        if sampled_ids is not None:
            sampled = np.array(sampled_ids, np.int32)
        policy = epochs or [(0, 0)]
        if new_epoch_at is not None:
            policy = [(0, 0), (len(prompt) + new_epoch_at - 1, 1)]
        answer = {"role": "assistant", "content": reply}
        body = {"id": f"chatcmpl-{decision.model_call_id}", "choices": [{"message": answer}]}
        entry = self.ledger.entry_for(
            decision,
            response_id=str(body["id"]),
            response_messages=[answer],
            response_body=json.dumps(body),
        )
        evidence = CallEvidence(
            (),
            sampling=Sampling(temperature, 0, 1.0, 64, seed=7),
            logprobs_mode="raw",
            finish_reason="stop",
            tokenizer_fingerprint=(
                self.tokenizer_fingerprint if fingerprint == "" else fingerprint
            ),
            admitted_at=decision.admitted_at,
        )
        values = log_probs or (-self.rng.random(len(sampled))).tolist()
        outcome = self.stager.stage_admitted(
            "uid",
            OffloadedRequestPayload(prompt, sampled, np.array(values, np.float32)),
            finished_metadata=FinishedRequestRecord(policy_epoch=policy, kv_cache_epoch=policy),
            offload_params={
                ADMISSION_KEY: decision.admission,
                CONTEXT_KEY: CallContext(evidence, entry),
            },
        )
        assert outcome.staged
        return [*messages, answer]

    def fail(self, rollout: str, code: str) -> None:
        self.ledger.record_failure(CaptureFailure(rollout, "lost-call", code, "says why", 5.0))

    def publish(self, *rollouts: str, **options: Any) -> None:
        collector = Collector(self.source, self.ledger, **options)
        rows = collector.finalize_group(
            [RolloutOutcome(name, reward=0.5, group_id="g") for name in rollouts]
        )
        collector.publish(rows, self.store)

    def key(self, rollout: str, index: int) -> str:
        return self.store.keys("staged", f"{rollout}/")[index]


def say(history: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [*history, {"role": "user", "content": text}]


def tell(path: Path) -> Story:
    """alpha: three turns, weights changed in the second. beta: a branch that came to nothing.

    Both are published. gamma: one call, and one that was not captured.
    """
    story = Story(path)
    talk = story.call("alpha", say([], "two plus two?"), "4, naïve friend")
    talk = story.call("alpha", say(talk, "times ten?"), "about forty", new_epoch_at=6)
    story.call("alpha", say(talk, "thanks"), "bye", epochs=[(0, 1)])
    talk = story.call("beta", say([], "hello"), "hi")
    story.call("beta", say(talk, "wrong way"), "oh no")
    talk = story.call("beta", say(talk, "right way"), "yes")
    story.call("beta", say(talk, "more"), "done", temperature=0.5)
    story.publish("alpha", "beta")
    story.call("gamma", say([], "alone"), "indeed")
    story.fail("gamma", "unresolved_parent")
    return story
