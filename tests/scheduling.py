"""Which tests pytest-xdist hands out together: those that share something slow to start.

xdist's own ``--dist loadgroup`` tells its controller the groups in the node ids, which pytest 9.2
does not let it change (pytest-xdist issue 1386); here the path of a file says it.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = (
    "tests/dynamic/test_dynamic_",  # a coordinator process
    "tests/interop/",  # NeMo-Gym's model servers and its contract process
    "tests/packaging/",  # the built wheel, and an environment for each Python
    "tests/stores/test_tq_",  # a local Ray with the queue
)


def scope_of(nodeid: str) -> str:
    """Tests of one scope run on one worker, in order: a file, or files that begin alike."""
    path = nodeid.partition("::")[0]
    return next((start for start in TOGETHER if path.startswith(start)), path)


class TogetherScheduling(LoadScopeScheduling):
    """Hands out whole scopes in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def slow_first(items: list[pytest.Item]) -> None:
    """Order scopes so that none with a slow test starts when the other workers are done."""
    slow = {scope_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: scope_of(item.nodeid) not in slow)
