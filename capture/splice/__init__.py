"""The structural splice: the suffix that a template prints after the last assistant turn."""

from tokenplane.capture.splice.cache import CacheStats, SpliceCache
from tokenplane.capture.splice.codes import EXPLANATIONS, SpliceCode
from tokenplane.capture.splice.conformance import Outcome, ShapeReport, conformance_report
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message, Tool
from tokenplane.capture.splice.structural import SpliceResult, structural_suffix
from tokenplane.capture.splice.token_splice import splice_by_tokens

__all__ = [
    "EXPLANATIONS",
    "CacheStats",
    "ChatTemplateRenderer",
    "Message",
    "Outcome",
    "ShapeReport",
    "SpliceCache",
    "SpliceCode",
    "SpliceResult",
    "Tool",
    "conformance_report",
    "splice_by_tokens",
    "structural_suffix",
]
