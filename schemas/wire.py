"""Wire models of a model call: admission, record, result, coordinates (CONTRACT section 5).

pydantic stands only where JSON enters or leaves; the hot path uses ``staged_call.StagedCall``.
Unknown fields, NaN and infinities are refused everywhere; every field is written, nulls included.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tokenplane.schemas.digests import (
    ABSENT_EXTRAS_DIGEST,
    DIGEST_VERSION,
    EXTRAS_DIGEST_VERSION,
    SCHEMA_VERSION,
    extras_digest,
    staging_digest,
)
from tokenplane.schemas.errors import InvalidRecordError

Id = Annotated[str, StringConstraints(strict=True, min_length=1)]
UInt = Annotated[int, Field(strict=True, ge=0)]
HexDigest = Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]
Mode = Literal["token_in", "text"]


def _true_ids(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= {int}:
        bad = next(x for x in value if type(x) is not int)
        raise ValueError(f"token ids must be true integers, got {bad!r}")
    return value


def _plain_floats(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= {int, float}:
        bad = next(x for x in value if type(x) not in (int, float))
        raise ValueError(f"expected floats, got {bad!r}")
    return value


TokenIdList = Annotated[list[int], BeforeValidator(_true_ids)]
FloatList = Annotated[list[float], BeforeValidator(_plain_floats)]


class WireModel(BaseModel):
    """Strict base: unknown fields refused, NaN and infinity refused, ``schema_version`` 2."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    schema_version: Literal[2] = SCHEMA_VERSION


class DigestedModel(WireModel):
    """A wire model that also names the digest versions it was made under."""

    digest_version: Literal[2] = DIGEST_VERSION
    extras_digest_version: Literal[1] = EXTRAS_DIGEST_VERSION


class CaptureAdmission(WireModel):
    """Model server to worker: which call this is and which staged prefix it continues."""

    rollout_id: Id
    model_call_id: Id
    parent_call_id: Id | None = None
    prev_len: UInt = 0
    mode: Mode
    required_prefix_token_ids: TokenIdList = Field(default_factory=list)
    staging_chain: list[Annotated[str, StringConstraints(strict=True)]] = Field(
        default_factory=list
    )
    parent_chain_hash: HexDigest | None = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.required_prefix_token_ids and min(self.required_prefix_token_ids) < 0:
            raise ValueError("required_prefix_token_ids must not be negative")
        if self.mode == "text":
            if (
                self.parent_call_id is not None
                or self.prev_len
                or self.required_prefix_token_ids
                or self.staging_chain
                or self.parent_chain_hash is not None
            ):
                raise ValueError("a text admission has no parent, prefix, chain or prev_len")
            return self
        if self.parent_call_id is None or not self.prev_len or self.parent_chain_hash is None:
            raise ValueError("token_in needs parent_call_id, prev_len > 0 and parent_chain_hash")
        if not self.staging_chain and len(self.required_prefix_token_ids) != self.prev_len:
            raise ValueError(
                "without a staging_chain the inline prefix must have prev_len "
                f"({self.prev_len}) tokens, got {len(self.required_prefix_token_ids)}"
            )
        return self


class StagedCallBaseSnapshot(DigestedModel):
    """A staged row without its extras payload; construction recomputes the digest."""

    rollout_id: Id
    model_call_id: Id
    parent_call_id: Id | None = None
    mode: Mode
    prev_len: UInt
    delta_len: UInt
    cum_len: UInt
    weight_version: UInt
    digest: HexDigest
    token_ids_delta: TokenIdList
    token_mask_delta: FloatList
    generation_log_probs_delta: FloatList
    extras_digest: HexDigest = ABSENT_EXTRAS_DIGEST
    chain_hash: HexDigest
    cumulative_hash: HexDigest

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        expected = staging_digest(
            **{name: getattr(self, name) for name in SIGNED_FIELDS},
        )
        if expected != self.digest:
            raise InvalidRecordError("digest does not match", expected=expected, got=self.digest)
        return self

    @property
    def default_staging_key(self) -> str:
        """``rollout/call``: a convention only; keys are opaque to every consumer."""
        return f"{self.rollout_id}/{self.model_call_id}"


SIGNED_FIELDS = (
    "rollout_id",
    "model_call_id",
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "token_ids_delta",
    "token_mask_delta",
    "generation_log_probs_delta",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
    "schema_version",
    "digest_version",
    "extras_digest_version",
)
"""The fields that ``staging_digest`` takes, by the names that every record form shares."""


class StagedCallRecord(StagedCallBaseSnapshot):
    """A staged row with its extras payload, whose digest is checked."""

    extras: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_extras(self) -> Self:
        expected = extras_digest(self.extras)
        if expected != self.extras_digest:
            raise InvalidRecordError(
                "extras_digest does not match", expected=expected, got=self.extras_digest
            )
        return self


StagedCallSnapshot = StagedCallRecord


class StageResult(WireModel):
    """What a sink answers: the key it stored under, or an error."""

    ok: bool
    staging_key: Id | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _check_outcome(self) -> Self:
        if self.ok and self.staging_key is None:
            raise ValueError("ok needs a staging_key")
        if not self.ok and not self.error:
            raise ValueError("a failed stage needs a non-empty error")
        return self


class CommitCoords(DigestedModel):
    """Worker to model server: the token-free acknowledgement of one call."""

    rollout_id: Id
    model_call_id: Id
    parent_call_id: Id | None = None
    prev_len: UInt
    delta_len: UInt
    cum_len: UInt
    weight_version: UInt
    disposition: Literal["staged", "capture_failed"] = "staged"
    digest: HexDigest | None = None
    extras_digest: HexDigest | None = None
    staging_key: Id | None = None
    chain_hash: HexDigest | None = None
    cumulative_hash: HexDigest | None = None

    @model_validator(mode="after")
    def _check_disposition(self) -> Self:
        if (self.parent_call_id is None) != (self.prev_len == 0):
            raise ValueError("parent_call_id and prev_len > 0 go together")
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError("cum_len must be prev_len + delta_len")
        proof = (
            self.digest,
            self.extras_digest,
            self.staging_key,
            self.chain_hash,
            self.cumulative_hash,
        )
        if self.disposition == "staged":
            if None in proof or self.delta_len == 0:
                raise ValueError("staged needs every digest, a staging_key and delta_len > 0")
        elif proof != (None,) * 5 or self.delta_len:
            raise ValueError("capture_failed carries no digest, no staging_key and delta_len 0")
        return self


Model = TypeVar("Model", bound=BaseModel)


def parse_model[Model: BaseModel](
    model: type[Model], data: object, *, key: str | None = None
) -> Model:
    """``data`` (JSON text, bytes, mapping or an instance) as a checked ``model``.

    Raises:
        InvalidRecordError: the first broken rule and its location; pydantic's error is chained.
    """
    try:
        if isinstance(data, (str, bytes, bytearray)):
            return model.model_validate_json(data)
        return model.model_validate(data)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or model.__name__
        raise InvalidRecordError(f"{model.__name__}: {where}: {first['msg']}", key=key) from exc
