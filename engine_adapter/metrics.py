"""What the server counts, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tokenplane.engine_adapter.call_path.call_types import CallTimings

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)
STAGES = ("resolve", "splice", "queue", "prefill", "decode", "stage", "total")


class ServerMetrics:
    """Counters of one server, in a registry of their own. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "tokenplane_calls",
            "Answered calls by what became of their capture; refused and failed ones by code.",
            ["outcome"],
            registry=self.registry,
        )
        self._failures = Counter(
            "tokenplane_capture_failures",
            "Calls without a staged row, by reason.",
            ["code"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tokenplane_call_seconds",
            "Where captured and other calls spend their time.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "tokenplane_tokens",
            "Tokens of staged calls: carried (mask 0) and generated (mask 1).",
            ["kind"],
            registry=self.registry,
        )
        self._prefixes = Counter(
            "tokenplane_prefixes",
            "Prefixes of captured calls, by where they came from.",
            ["source"],
            registry=self.registry,
        )
        self._spans = Counter(
            "tokenplane_epoch_spanning_calls",
            "Staged calls that lived under more than one weight version.",
            registry=self.registry,
        )

    def count_call(self, outcome: str) -> None:
        """One answered, refused or failed call."""
        self._calls.labels(outcome).inc()

    def count_failure(self, code: str) -> None:
        """One capture failure."""
        self._failures.labels(code).inc()

    def count_staged(self, *, carried: int, generated: int, source: str, spans: bool) -> None:
        """One staged call."""
        self._tokens.labels("carried").inc(carried)
        self._tokens.labels("generated").inc(generated)
        self._prefixes.labels(source).inc()
        if spans:
            self._spans.inc()

    def observe(self, timings: CallTimings) -> None:
        """The times of one answered call."""
        for stage in STAGES:
            self._seconds.labels(stage).observe(getattr(timings, f"{stage}_s"))

    def add_gauges(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Values that are read at each scrape; ``read`` gives them by name without prefix."""
        self.registry.register(_Gauges(read))

    def render(self) -> bytes:
        """The exposition text. Reads the gauges, so it may wait for the store."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"tokenplane_{name}", _HELP[name], value=value)

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # nothing is read while the collector is registered


_HELP: Mapping[str, str] = {
    "engine_live_requests": "Requests that are being computed.",
    "engine_waiting_requests": "Requests that wait for their first step.",
    "engine_kv_tokens": "Positions in the KV cache.",
    "engine_generated_tokens": "Tokens that the engine has sampled.",
    "weight_version": "The version that the engine's weights bear; -1 before one was set.",
    "prefix_cache_hits": "Prefixes that were in the resolver's cache.",
    "prefix_cache_misses": "Prefixes that were read from the store.",
    "prefix_cache_bytes": "Bytes of cached prefixes.",
    "staged_rows": "Rows in the staging partition.",
    "staged_bytes": "Bytes of their messages.",
    "store_up": "1 if the store answered this scrape.",
}
