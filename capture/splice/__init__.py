"""The structural splice: the suffix that a template prints after the last assistant turn."""

from tokenplane.capture.splice.cache import CacheStats, SpliceCache
from tokenplane.capture.splice.codes import EXPLANATIONS, SpliceCode
from tokenplane.capture.splice.renderer import ChatTemplateRenderer, Message, Tool
from tokenplane.capture.splice.structural import SpliceResult, structural_suffix

__all__ = [
    "EXPLANATIONS",
    "CacheStats",
    "ChatTemplateRenderer",
    "Message",
    "SpliceCache",
    "SpliceCode",
    "SpliceResult",
    "Tool",
    "structural_suffix",
]
