"""What a splice costs beside one full encode, cold and warm (``python -m`` this module)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from tokenplane.capture.splice import Message, SpliceCache, structural_suffix
from tokenplane.capture.splice.shapes import TOOLS
from tokenplane.schemas.errors import ConfigError

if TYPE_CHECKING:
    from tokenplane.engine_adapter.chat.renderer import TokenizerChatRenderer

_ANSWER: Message = {"role": "assistant", "content": "ok"}
_NEXT: Message = {"role": "user", "content": "next " * 100}


@dataclass(frozen=True, slots=True)
class SpliceCost:
    """Milliseconds, each the least of several runs."""

    tokens: int
    first_ms: float
    """An empty cache and a long history: everything is probed and proven."""
    warm_ms: float
    """The next turn of a conversation that was spliced before."""
    render_ms: float
    encode_ms: float
    """One render and one encoding of the whole conversation: what an ordinary request pays."""


def main(argv: list[str] | None = None) -> int:
    """0; 2: no such tokenizer, or wrong usage."""
    options = _parser().parse_args(argv)
    from tokenplane.engine_adapter.chat.renderer import open_renderer

    try:
        renderer = open_renderer(options.tokenizer)
    except ConfigError as error:
        print(f"bench splice: {error}", file=sys.stderr)
        return 2
    costs = [measure(renderer, rounds, options.repeat) for rounds in options.rounds]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return 0
    table = Table("tokens", "first, ms", "warm, ms", "one render, ms", "full encode, ms")
    for cost in costs:
        times = (cost.first_ms, cost.warm_ms, cost.render_ms, cost.encode_ms)
        table.add_row(str(cost.tokens), *(f"{ms:.2f}" for ms in times))
    Console().print(table)
    return 0


def measure(renderer: TokenizerChatRenderer, rounds: int, repeat: int) -> SpliceCost:
    """The cost after ``rounds`` of user, call, result and answer (about 600 tokens each)."""
    history = _history(rounds)
    later: list[Message] = [*history, _ANSWER, _NEXT]

    def render(messages: Sequence[Message]) -> str:
        return renderer.render(messages, TOOLS, add_generation_prompt=True, template_kwargs=None)

    text = render(history)
    end = renderer.token_text(min(renderer.terminator_ids))
    sampled = renderer.encode(f"ok{end}")
    prefix = np.concatenate([renderer.encode(text), sampled])

    def splice(
        staged: np.ndarray[tuple[int], np.dtype[np.int32]],
        messages: Sequence[Message],
        cache: SpliceCache,
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        result = structural_suffix(
            renderer,
            prefix_token_ids=staged,
            n_sampled=len(sampled),
            history=messages,
            assistant=_ANSWER,
            new_messages=[_NEXT],
            tools=TOOLS,
            terminator_ids=renderer.terminator_ids,
            cache=cache,
        )
        return np.concatenate([staged, result.suffix_token_ids])

    cache = SpliceCache()
    grown = np.concatenate([splice(prefix, history, cache), sampled])
    splice(grown, later, cache)
    whole = render(later)
    return SpliceCost(
        tokens=len(grown),
        first_ms=_least_ms(lambda: splice(prefix, history, SpliceCache()), repeat),
        warm_ms=_least_ms(lambda: splice(grown, later, cache), repeat),
        render_ms=_least_ms(lambda: render(later), repeat),
        encode_ms=_least_ms(lambda: renderer.encode(whole), repeat),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tokenplane.tools.bench.splice",
        description="Time the splice on conversations of growing length.",
    )
    parser.add_argument("tokenizer", help="folder with tokenizer.json and a chat template")
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 20, 100], metavar="N")
    parser.add_argument("--repeat", type=int, default=5, help="runs per number (the least counts)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _history(rounds: int) -> list[Message]:
    history: list[Message] = []
    for number in range(rounds):
        call_id = f"call{number:05d}"
        function = {"name": "get_weather", "arguments": {"city": "Paris"}}
        call = {"id": call_id, "type": "function", "function": function}
        history += [
            {"role": "user", "content": "word " * 200},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "out " * 300, "tool_call_id": call_id},
            {"role": "assistant", "content": "fine " * 50},
        ]
    return [*history, {"role": "user", "content": "x"}]


def _least_ms(run: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


if __name__ == "__main__":
    raise SystemExit(main())
