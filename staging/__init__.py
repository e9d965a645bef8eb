"""Stores for staged and training rows."""

from __future__ import annotations

from tokenplane.staging.open_store import open_store as open_store
from tokenplane.staging.store import StagingStore as StagingStore
from tokenplane.staging.store_types import Blob as Blob
from tokenplane.staging.store_types import Claimed as Claimed
from tokenplane.staging.store_types import RetentionPolicy as RetentionPolicy
from tokenplane.staging.store_types import StoreStats as StoreStats
from tokenplane.staging.store_types import SweepReport as SweepReport
from tokenplane.staging.store_types import to_blob as to_blob
from tokenplane.staging.token_sink import TokenSink as TokenSink
from tokenplane.staging.token_source import TokenDelta as TokenDelta
from tokenplane.staging.token_source import TokenSource as TokenSource
