"""Prefix resolver, splice, capture core, completion stager, ledger and collector."""

from __future__ import annotations

from tokenplane.capture.collect.collector import Collector as Collector
from tokenplane.capture.collect.linearize import linearize as linearize
from tokenplane.capture.collect.linearize import verify_and_linearize as verify_and_linearize
from tokenplane.capture.collect.receipt import build_receipt as build_receipt
from tokenplane.capture.collect.training_rows import RolloutOutcome as RolloutOutcome
from tokenplane.capture.core import RolloutTokenCapture as RolloutTokenCapture
from tokenplane.capture.core import install_capture as install_capture
from tokenplane.capture.ledger import Ledger as Ledger
from tokenplane.capture.ledger import LedgerRequest as LedgerRequest
from tokenplane.capture.prefix_resolver import PrefixResolver as PrefixResolver
from tokenplane.capture.prompt_preparer import TQMegatronPromptPreparer as TQMegatronPromptPreparer
from tokenplane.capture.token_stager import TQMegatronTokenStager as TQMegatronTokenStager
