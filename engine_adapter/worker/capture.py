"""Token capture on a worker's engine: store, resolver, preparer and stager, on leaders only."""

from __future__ import annotations

from dataclasses import dataclass

from tokenplane.capture.prefix_resolver import PrefixResolver
from tokenplane.capture.prompt_preparer import TQMegatronPromptPreparer
from tokenplane.capture.token_stager import TQMegatronTokenStager
from tokenplane.schemas.errors import ConfigError
from tokenplane.staging.open_store import open_store
from tokenplane.staging.store import StagingStore
from tokenplane.staging.token_sink import TokenSink
from tokenplane.staging.token_source import TokenSource


@dataclass(frozen=True, slots=True)
class CapturePair:
    """The two hooks over one store and one resolver, so that a staged turn need not be read."""

    preparer: TQMegatronPromptPreparer
    stager: TQMegatronTokenStager
    own_store: StagingStore | None = None
    """The store, if it was opened here."""

    def close(self) -> None:
        """Close the store if it was opened here; idempotent."""
        if self.own_store is not None:
            self.own_store.close()


def make_capture(
    store: StagingStore | str, staging_partition: str, *, capture_media: bool = False
) -> CapturePair:
    """The hooks over ``staging_partition`` of a store that the caller keeps open, or of one that is
    opened by its URL.

    Raises: ConfigError for media: text rows have no media columns; what opening raises.
    """
    if capture_media:
        raise ConfigError("media cannot be captured on this engine", key="capture_media")
    own: StagingStore | None = None
    if isinstance(store, str):
        store = own = open_store(store)
    resolver = PrefixResolver(TokenSource(store, staging_partition))
    stager = TQMegatronTokenStager(TokenSink(store, staging_partition), resolver=resolver)
    return CapturePair(TQMegatronPromptPreparer(resolver), stager, own)
