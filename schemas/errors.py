"""The error tree of tokenplane: every class has a stable ``code`` and pickles.

::

    TokenplaneError
    ├── ConfigError                     bad_config
    ├── SchemaError                     schema_error
    │   ├── InvalidRecordError          invalid_record          (also a ValueError)
    │   ├── TokenIdRangeError           token_id_out_of_range   (also a ValueError)
    │   └── UnsupportedSchemaError      unsupported_schema      (also a ValueError)
    ├── StoreError                      store_error
    │   ├── MissingRowError             missing_row             (also a KeyError)
    │   ├── InvalidKeyError             invalid_key             (also a ValueError)
    │   ├── KeyConflictError            key_conflict
    │   ├── CorruptRowError             corrupt_row
    │   ├── SchemaMismatchError         schema_mismatch
    │   ├── SealedPartitionError        sealed_partition
    │   ├── RowHeldError                row_held                retryable
    │   ├── StoreFullError              store_full              retryable
    │   ├── StoreUnavailableError       store_unavailable       retryable
    │   ├── StoreTimeoutError           store_timeout           retryable
    │   ├── StoreClosedError            store_closed
    │   └── UnsupportedStoreError       unsupported_store
    ├── CaptureError                    capture_error
    │   ├── StreamingUnsupportedError   streaming_unsupported
    │   ├── PrefixError                 one code per cause, see the class
    │   ├── SpliceError                 one code per template feature, see capture/splice
    │   └── LedgerError                 one code per cause, see the class
    ├── ReceiptVerificationError        one code per check, CONTRACT section 9 (also a ValueError)
    │   └── RebuildError                one code per check
    └── EngineError                     engine_error
        ├── RequestRejectedError        invalid_request
        │   └── ContextOverflowError    context_length_exceeded
        ├── RequestCancelledError       request_cancelled
        ├── EngineStateError            engine_state
        ├── EngineDeadError             engine_dead             retryable
        └── DeadlineError               deadline_exceeded       retryable (also a TimeoutError)

How to add one: put the class under its parent, give it a ``code`` that no other class has, add a
line to the tree above (``tests/schemas/test_errors.py`` compares the two), and raise it with
``expected``/``got``/``key`` where they apply. A constructor takes one positional ``message`` and
the keyword context of the base class, so that ``pickle`` (Ray carries errors) rebuilds it.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TokenplaneError(Exception):
    """Root of the tree. ``str(error)`` is the message with its context appended."""

    code: str = "tokenplane_error"
    """Stable machine-readable name of the failure; instances may narrow it (see ``coded``)."""
    retryable: ClassVar[bool] = False
    """True where the same call may succeed later without anybody changing anything."""

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        key: str | None = None,
        expected: object = None,
        got: object = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.key = key
        self.expected = expected
        self.got = got

    def __str__(self) -> str:
        parts = [self.message or self.code]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.got is not None:
            parts.append(f"got {self.got}")
        if self.key is not None:
            parts.append(f"key {self.key!r}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__)))


def _rebuild(cls: type[TokenplaneError], message: str, state: dict[str, object]) -> TokenplaneError:
    error = cls(message)
    error.__dict__.update(state)
    return error


class ConfigError(TokenplaneError):
    """A setting is missing, unknown, or contradicts another."""

    code = "bad_config"


class SchemaError(TokenplaneError):
    """Something does not have the shape that a schema of ours demands."""

    code = "schema_error"


class InvalidRecordError(SchemaError, ValueError):
    """A record breaks a rule of the wire contract (CONTRACT sections 3 to 5)."""

    code = "invalid_record"


class TokenIdRangeError(SchemaError, ValueError):
    """A token id is negative or does not fit int32 (the wire allows more, the columns do not)."""

    code = "token_id_out_of_range"


class UnsupportedSchemaError(SchemaError, ValueError):
    """A row or message was written under a schema version that this build does not know."""

    code = "unsupported_schema"


class StoreError(TokenplaneError):
    """A staging store could not do what it was asked."""

    code = "store_error"


class MissingRowError(StoreError, KeyError):
    """At least one requested key has no row. ``key`` is the first one missing."""

    code = "missing_row"
    __str__ = TokenplaneError.__str__  # KeyError would print the repr of its argument


class InvalidKeyError(StoreError, ValueError):
    """A partition or key is empty, malformed or named twice in one request."""

    code = "invalid_key"


class KeyConflictError(StoreError):
    """Another row is already stored under this key; nothing was overwritten."""

    code = "key_conflict"


class CorruptRowError(StoreError):
    """Stored bytes fail their checksum, their identity or their format."""

    code = "corrupt_row"


class SchemaMismatchError(StoreError):
    """A row's columns do not fit the partition or the schema that it claims."""

    code = "schema_mismatch"


class SealedPartitionError(StoreError):
    """The partition was sealed and takes no more rows."""

    code = "sealed_partition"


class RowHeldError(StoreError):
    """A row is being read under a live hold and cannot be removed now. ``key`` is the first one."""

    code = "row_held"
    retryable = True


class StoreFullError(StoreError):
    """The byte budget (or the disk) stayed full for the whole bounded wait; nothing was written."""

    code = "store_full"
    retryable = True


class StoreUnavailableError(StoreError):
    """The server or file behind the store does not answer."""

    code = "store_unavailable"
    retryable = True


class StoreTimeoutError(StoreError):
    """The store did not answer within its deadline; whether the write happened is unknown."""

    code = "store_timeout"
    retryable = True


class StoreClosedError(StoreError):
    """The store was closed before this call."""

    code = "store_closed"


class UnsupportedStoreError(StoreError):
    """The URL names no backend of ours, or its library or version does not qualify."""

    code = "unsupported_store"


class CaptureError(TokenplaneError):
    """A captured call was driven wrongly or cannot be captured (CONTRACT section 6)."""

    code = "capture_error"


class StreamingUnsupportedError(CaptureError):
    """The capture core was asked to capture a call whose engine answer is a stream."""

    code = "streaming_unsupported"


class PrefixError(CaptureError):
    """The staged prefix of a call cannot be proven.

    Codes: ``prefix_missing_row``, ``prefix_wrong_rollout``, ``prefix_order``, ``prefix_length``,
    ``prefix_chain_hash``, ``prefix_duplicate_key``, ``prefix_store_failure``,
    ``prefix_not_in_prompt``, ``prefix_inline_mismatch``, ``prefix_prompt_type``,
    ``prefix_no_splice_inputs``.
    """

    code = "prefix_error"


class SpliceError(CaptureError):
    """The boundary after the last assistant turn cannot be proven for this template.

    ``code`` names the template feature (list in ``capture/splice``).
    """

    code = "splice_error"


class LedgerError(CaptureError):
    """The standalone ledger refuses an admission.

    Codes: ``invalid_rollout_id``, ``idempotency_mismatch``, ``idempotency_superseded``,
    ``unknown_parent``.
    """

    code = "ledger_error"


class ReceiptVerificationError(TokenplaneError, ValueError):
    """A receipt or the rows behind it fail a check; ``code`` is CONTRACT section 9's."""

    code = "receipt_invalid"


class RebuildError(ReceiptVerificationError):
    """The rows are intact but do not rebuild one sequence; ``code`` is CONTRACT section 9's."""

    code = "rebuild_failed"


class EngineError(TokenplaneError):
    """The inference engine could not do what it was asked."""

    code = "engine_error"


class RequestRejectedError(EngineError):
    """The request breaks a limit or names something that the engine does not offer."""

    code = "invalid_request"


class ContextOverflowError(RequestRejectedError):
    """Prompt (plus at least one token) exceeds the context length."""

    code = "context_length_exceeded"


class RequestCancelledError(EngineError):
    """The request was cancelled before it finished; its partial output is discarded."""

    code = "request_cancelled"


class EngineStateError(EngineError):
    """The transition is not legal from the state that the message names."""

    code = "engine_state"


class EngineDeadError(EngineError):
    """The engine loop or process has ended; requests in flight are lost."""

    code = "engine_dead"
    retryable = True


class DeadlineError(EngineError, TimeoutError):
    """A control call or a request did not finish within its deadline."""

    code = "deadline_exceeded"
    retryable = True
