"""The prompt preparer: a continuation's prompt becomes its staged prefix plus the new suffix."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tokenplane.capture.hook_types import (
    ADMISSION_KEY,
    PREFIX_KEY,
    SPLICE_KEY,
    TEMPLATE_PREFIX_KEY,
    TERMINATORS_KEYS,
    PreparedPrefix,
    RequestPromptPreparationResult,
    SpliceInputs,
)
from tokenplane.capture.prefix_resolver import PrefixResolver, ResolvedPrefix, TokenDeltaSource
from tokenplane.capture.splice import SpliceCache, splice_by_tokens, structural_suffix
from tokenplane.schemas.errors import PrefixError, SpliceError
from tokenplane.schemas.tokens import Int32Array, first_difference, frozen, to_token_ids
from tokenplane.schemas.wire import CaptureAdmission, parse_model


class TQMegatronPromptPreparer:
    """Resolves an admitted prefix and splices it into the rendered prompt.

    Called before the engine admits a request; what it raises fails that request alone, with a
    clear error and before any generation (invariant 3). Thread-safe.

    Args:
        source: a token source (``staging.TokenSource``), or a ``PrefixResolver`` to share.
    """

    def __init__(self, source: TokenDeltaSource | PrefixResolver) -> None:
        self.resolver = source if isinstance(source, PrefixResolver) else PrefixResolver(source)
        self._renderer: object = None
        self._cache = SpliceCache()

    def prepare_prompt(
        self, prompt: Any, *, offload_params: dict[str, Any] | None = None
    ) -> RequestPromptPreparationResult:
        """The prompt that the engine shall be conditioned on.

        Ordinary traffic (no ``ng_capture``) and ``text`` calls pass unchanged. For ``token_in`` the
        result starts with exactly the staged tokens. The suffix comes, in this order, from
        ``_tokenplane_splice`` (the structural splice), from ``template_prefix_token_ids`` with the
        terminators (the token-only splice, as Megatron's endpoint sends), or from a token prompt
        that already starts with the prefix.

        Args:
            prompt: token ids of the rendered conversation (list, int32 array or tensor).

        Raises:
            InvalidRecordError: the admission is malformed.
            PrefixError: the prefix cannot be proven.
            SpliceError: the boundary after the last assistant turn cannot be proven.
        """
        if not offload_params or ADMISSION_KEY not in offload_params:
            return RequestPromptPreparationResult(prompt, offload_params)
        admission = parse_model(CaptureAdmission, offload_params[ADMISSION_KEY], key=ADMISSION_KEY)
        started = time.perf_counter()
        resolved = self.resolver.resolve(admission)
        resolve_s = time.perf_counter() - started
        if admission.mode == "text":
            return _result(prompt, offload_params, PreparedPrefix(resolved, (), resolve_s))
        started = time.perf_counter()
        spliced, notes = self._splice(prompt, resolved, offload_params)
        at = first_difference(spliced[: admission.prev_len], resolved.token_ids)
        if at is not None:
            raise PrefixError(
                f"the prompt differs from the staged prefix at token {at}",
                code="prefix_not_in_prompt",
                key=admission.model_call_id,
            )
        prepared = PreparedPrefix(resolved, notes, resolve_s, time.perf_counter() - started)
        return _result(spliced, offload_params, prepared)

    def _splice(
        self, prompt: Any, resolved: ResolvedPrefix, offload_params: dict[str, Any]
    ) -> tuple[Int32Array, tuple[str, ...]]:
        inputs = offload_params.get(SPLICE_KEY)
        if isinstance(inputs, SpliceInputs):
            return self._structural(resolved, inputs)
        ids = _prompt_ids(prompt)
        template_prefix = offload_params.get(TEMPLATE_PREFIX_KEY)
        if template_prefix is not None:
            spliced = splice_by_tokens(
                ids,
                to_token_ids(template_prefix, name=TEMPLATE_PREFIX_KEY),
                resolved.token_ids,
                _terminators(offload_params),
            )
            return spliced, ("by_tokens",)
        if first_difference(ids[: len(resolved.token_ids)], resolved.token_ids) is None:
            return ids, ("already_prefixed",)
        raise PrefixError(
            "the prompt does not start with the staged prefix, and no splice inputs came",
            code="prefix_no_splice_inputs",
            expected=f"{SPLICE_KEY} or {TEMPLATE_PREFIX_KEY}",
        )

    def _structural(
        self, resolved: ResolvedPrefix, inputs: SpliceInputs
    ) -> tuple[Int32Array, tuple[str, ...]]:
        messages = list(inputs.messages)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise SpliceError(
                "a continuation needs an assistant turn in its messages", code="no_assistant_turn"
            )
        at = turns[-1]
        suffix = structural_suffix(
            inputs.renderer,
            prefix_token_ids=resolved.token_ids,
            n_sampled=resolved.n_sampled,
            history=messages[:at],
            assistant=messages[at],
            new_messages=messages[at + 1 :],
            tools=inputs.tools,
            template_kwargs=inputs.template_kwargs,
            terminator_ids=inputs.terminator_ids,
            cache=self._cache_of(inputs.renderer),
        )
        whole = np.concatenate([resolved.token_ids, suffix.suffix_token_ids])
        return frozen(whole), tuple(suffix.notes)

    def _cache_of(self, renderer: object) -> SpliceCache:
        # A cache serves one renderer; a server has one, so the last one's cache is kept.
        if renderer is not self._renderer:
            self._renderer, self._cache = renderer, SpliceCache()
        return self._cache


def _result(
    prompt: Any, offload_params: dict[str, Any], prepared: PreparedPrefix
) -> RequestPromptPreparationResult:
    params = {k: v for k, v in offload_params.items() if k != SPLICE_KEY}
    return RequestPromptPreparationResult(prompt, params | {PREFIX_KEY: prepared})


def _prompt_ids(prompt: Any) -> Int32Array:
    if isinstance(prompt, str):
        raise PrefixError(
            "a continuation needs a token prompt", code="prefix_prompt_type", got="text"
        )
    # A torch tensor becomes an array without this module importing torch.
    return to_token_ids(prompt.numpy() if hasattr(prompt, "numpy") else prompt, name="prompt")


def _terminators(offload_params: dict[str, Any]) -> frozenset[int]:
    for key in TERMINATORS_KEYS:
        value = offload_params.get(key)
        if value is not None:
            ids = [value] if isinstance(value, int) else list(value)
            # bool is an int to Python; a flag is no token id.
            return frozenset(int(x) for x in ids if not isinstance(x, bool))
    raise PrefixError(
        "the token-only splice needs the turn terminators",
        code="prefix_no_splice_inputs",
        expected=" or ".join(TERMINATORS_KEYS),
    )
