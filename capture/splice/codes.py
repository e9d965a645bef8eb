"""Every reason for which a splice is refused, with one sentence each."""

from __future__ import annotations

from enum import StrEnum

from tokenplane.schemas.errors import SpliceError


class SpliceCode(StrEnum):
    """``SpliceError.code``; the value is stable and names the feature that stands in the way."""

    # What the caller asks for
    BAD_PREFIX = "bad_prefix"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    NOTHING_NEW = "nothing_new"
    ASSISTANT_IN_NEW = "assistant_in_new"
    MARKER_COLLISION = "marker_collision"
    # What the template does with the conversation
    TEMPLATE_RAISES = "template_raises"
    SENTINEL_MISSING = "sentinel_missing"
    SENTINEL_REPEATED = "sentinel_repeated"
    OLD_TEXT_IN_TAIL = "old_text_in_tail"
    OWN_TEXT_IN_TAIL = "own_text_in_tail"
    TOOLS_IN_TAIL = "tools_in_tail"
    NEW_TEXT_IN_HEAD = "new_text_in_head"
    NEW_TEXT_LOST_OR_MOVED = "new_text_lost_or_moved"
    TAIL_DEPENDS_ON_TEXT = "tail_depends_on_text"
    # Where the assistant turn ends
    NO_TERMINATOR = "no_terminator"
    TEXT_BEFORE_TERMINATOR = "text_before_terminator"
    CALL_NOT_RENDERED = "call_not_rendered"
    HEADER_TERMINATOR_MISMATCH = "header_terminator_mismatch"
    CUT_INSIDE_TOOL_CALL = "cut_inside_tool_call"
    CUT_INSIDE_REASONING = "cut_inside_reasoning"
    # Whether the rest of the prompt is still what the model saw
    HISTORY_REORDERED = "history_reordered"
    HISTORY_CHANGED = "history_changed"
    OPENING_CHANGED = "opening_changed"
    PREFIX_OPENING_DIFFERS = "prefix_opening_differs"
    HISTORY_NOT_IN_PREFIX = "history_not_in_prefix"
    # Token level
    TERMINATOR_NOT_ONE_TOKEN = "terminator_not_one_token"
    BOUNDARY_NOT_PROVEN = "boundary_not_proven"
    TURNS_DIFFER = "turns_differ"
    PREFIX_NOT_KEPT = "prefix_not_kept"
    SUFFIX_INCOMPLETE = "suffix_incomplete"


EXPLANATIONS: dict[SpliceCode, str] = {
    SpliceCode.BAD_PREFIX: "The staged prefix is empty or the number of sampled ids exceeds it.",
    SpliceCode.NO_ASSISTANT_TURN: "A continuation has no assistant turn in its messages.",
    SpliceCode.NOTHING_NEW: "The last turn has ended and no message follows it.",
    SpliceCode.ASSISTANT_IN_NEW: (
        "An assistant message that was never sampled stands after the last staged turn."
    ),
    SpliceCode.MARKER_COLLISION: "The conversation holds every marker that the probes could use.",
    SpliceCode.TEMPLATE_RAISES: "The chat template itself rejects this conversation.",
    SpliceCode.SENTINEL_MISSING: "The template does not print the last assistant turn.",
    SpliceCode.SENTINEL_REPEATED: "The template prints the last assistant turn more than once.",
    SpliceCode.OLD_TEXT_IN_TAIL: "The template prints an earlier message after the last turn.",
    SpliceCode.OWN_TEXT_IN_TAIL: (
        "The template prints the turn's reasoning after its answer, so its end cannot be placed."
    ),
    SpliceCode.TOOLS_IN_TAIL: "The template prints the tool schemas after the last turn.",
    SpliceCode.NEW_TEXT_IN_HEAD: (
        "The template moves a new message before the last assistant turn."
    ),
    SpliceCode.NEW_TEXT_LOST_OR_MOVED: (
        "The template drops, repeats or reorders a new message after the last assistant turn."
    ),
    SpliceCode.TAIL_DEPENDS_ON_TEXT: (
        "What follows the last turn depends on texts or the clock, or a text is rewritten."
    ),
    SpliceCode.NO_TERMINATOR: (
        "No terminator of the model follows the last assistant turn in this template."
    ),
    SpliceCode.TEXT_BEFORE_TERMINATOR: (
        "The template prints text of its own between the turn's content and its terminator."
    ),
    SpliceCode.CALL_NOT_RENDERED: (
        "The template prints the turn but not its last tool call, so its end cannot be placed."
    ),
    SpliceCode.HEADER_TERMINATOR_MISMATCH: (
        "The terminator is the next message's header and the model ended on another one."
    ),
    SpliceCode.CUT_INSIDE_TOOL_CALL: (
        "The turn was cut off inside a tool call, which the template cannot close."
    ),
    SpliceCode.CUT_INSIDE_REASONING: (
        "The turn was cut off inside its reasoning, and no template prints such a turn."
    ),
    SpliceCode.HISTORY_REORDERED: (
        "The template drops or reorders earlier messages once new ones follow."
    ),
    SpliceCode.HISTORY_CHANGED: (
        "Outside assistant turns the history is printed differently once new messages follow."
    ),
    SpliceCode.OPENING_CHANGED: (
        "What precedes the first assistant turn is printed differently now (a clock or a counter)."
    ),
    SpliceCode.PREFIX_OPENING_DIFFERS: (
        "The staged prefix does not start with this conversation's opening (system, tools, user)."
    ),
    SpliceCode.HISTORY_NOT_IN_PREFIX: "The staged prefix does not hold an earlier message.",
    SpliceCode.TERMINATOR_NOT_ONE_TOKEN: (
        "The terminator that the template prints is not one token of this tokenizer."
    ),
    SpliceCode.BOUNDARY_NOT_PROVEN: (
        "The rendered tokens alone do not show where the last assistant turn ends."
    ),
    SpliceCode.TURNS_DIFFER: (
        "A turn differs between the two renders by more than one removed span."
    ),
    SpliceCode.PREFIX_NOT_KEPT: "The spliced prompt does not start with the staged tokens.",
    SpliceCode.SUFFIX_INCOMPLETE: (
        "The spliced prompt does not hold every token of the render after the boundary once."
    ),
}


def splice_error(code: SpliceCode, *, expected: object = None, got: object = None) -> SpliceError:
    """The error of ``code`` with its explanation as message."""
    return SpliceError(EXPLANATIONS[code], code=code.value, expected=expected, got=got)
