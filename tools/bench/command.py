"""``tokenplane bench``: ``stores`` or ``soak``."""

from __future__ import annotations

import argparse
from importlib import import_module

BENCHMARKS = {
    "stores": ("tokenplane.tools.bench.stores", "staging and resolving, beside the raw peer"),
    "soak": ("tokenplane.tools.bench.soak", "many rollouts through one store, with retention"),
}


def main(argv: list[str] | None = None) -> int:
    """What the benchmark's own ``main`` gives."""
    listed = "\n".join(f"  {name:<7} {summary}" for name, (_, summary) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="tokenplane bench",
        description="Measure the stores.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "benchmark", metavar="BENCHMARK", choices=BENCHMARKS, help="one of those below"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    args = parser.parse_args(argv)
    status: int = import_module(BENCHMARKS[args.benchmark][0]).main(args.arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
