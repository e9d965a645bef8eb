"""Prometheus texts of several replicas as one, each sample with the name of its replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABEL = "replica"


class _Merged(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families

    def describe(self) -> list[Metric]:
        return []


def merge_metrics(texts: Mapping[str, str]) -> bytes:
    """The exposition text of all ``texts`` (by replica). Nothing is summed: sums of counters are a
    query's work, and a sum of what every replica reads from one store would be wrong."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            merged.samples += [
                Sample(s.name, {**s.labels, LABEL: replica}, s.value, s.timestamp, s.exemplar)
                for s in family.samples
            ]
    registry = CollectorRegistry()
    registry.register(_Merged(list(families.values())))
    return generate_latest(registry)
