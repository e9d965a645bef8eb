"""Wire models, digests, Arrow schemas, epoch arithmetic and the error tree."""

from __future__ import annotations

from tokenplane.schemas.errors import TokenplaneError as TokenplaneError
from tokenplane.schemas.manifest import CallRecord as CallRecord
from tokenplane.schemas.manifest import CaptureLedgerCommit as CaptureLedgerCommit
from tokenplane.schemas.manifest import ManifestFailure as ManifestFailure
from tokenplane.schemas.manifest import RolloutManifest as RolloutManifest
from tokenplane.schemas.manifest import RolloutReceipt as RolloutReceipt
from tokenplane.schemas.staged_call import StagedCall as StagedCall
from tokenplane.schemas.staged_row import CallEvidence as CallEvidence
from tokenplane.schemas.staged_row import LedgerEntry as LedgerEntry
from tokenplane.schemas.staged_row import Sampling as Sampling
from tokenplane.schemas.staged_row import StagedRow as StagedRow
from tokenplane.schemas.training_row import TrainingRow as TrainingRow
from tokenplane.schemas.wire import CaptureAdmission as CaptureAdmission
from tokenplane.schemas.wire import CommitCoords as CommitCoords
from tokenplane.schemas.wire import StagedCallBaseSnapshot as StagedCallBaseSnapshot
from tokenplane.schemas.wire import StagedCallRecord as StagedCallRecord
from tokenplane.schemas.wire import StagedCallSnapshot as StagedCallSnapshot
from tokenplane.schemas.wire import StageResult as StageResult
