"""Failures whose rows a store refuses: shown meanwhile, written later, in order, each once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from tokenplane.capture.failures import CaptureFailure
from tokenplane.capture.unsaved_failures import UnsavedFailures
from tokenplane.schemas.errors import InvalidKeyError, StoreError, StoreFullError


class Shelf:
    """Takes failures while it has room."""

    def __init__(self) -> None:
        self.error: StoreError | None = StoreFullError("no room")
        self.saved: list[str] = []
        self.tries = 0

    def save(self, failure: CaptureFailure) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.saved.append(failure.model_call_id)


def failure(call: str, rollout: str = "r") -> CaptureFailure:
    return CaptureFailure(rollout, call, "stage_failed", "full", 1.0)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_the_store_takes_is_written_at_once() -> None:
    shelf = Shelf()
    shelf.error = None
    unsaved = UnsavedFailures(shelf.save)
    unsaved.record(failure("a"))
    assert shelf.saved == ["a"]
    assert unsaved.waiting("r") == []
    assert unsaved.flush() == 0


def test_they_wait_in_order_and_a_full_store_is_asked_once() -> None:
    shelf = Shelf()
    unsaved = UnsavedFailures(shelf.save, retry_s=1000)
    for name in "abc":
        unsaved.record(failure(name))
    unsaved.record(failure("x", rollout="other"))
    assert shelf.tries == 1
    assert [f.model_call_id for f in unsaved.waiting("r")] == ["a", "b", "c"]
    assert unsaved.flush() == 4
    shelf.error = None
    assert unsaved.flush() == 0
    assert shelf.saved == ["a", "b", "c", "x"]
    assert unsaved.waiting("r") == []
    unsaved.close()


def test_they_are_written_by_themselves_when_there_is_room() -> None:
    shelf = Shelf()
    unsaved = UnsavedFailures(shelf.save, retry_s=0.01)
    unsaved.record(failure("a"))
    wait_for(lambda: shelf.tries > 3)
    shelf.error = None
    wait_for(lambda: shelf.saved == ["a"])
    wait_for(lambda: not any(t.name == "tokenplane-failures" for t in threading.enumerate()))
    shelf.error = StoreFullError("again")
    unsaved.record(failure("b"))
    shelf.error = None
    wait_for(lambda: shelf.saved == ["a", "b"])
    unsaved.close()


def test_closing_tries_once_more_and_says_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    unsaved = UnsavedFailures(shelf.save, retry_s=1000)
    unsaved.record(failure("a"))
    with caplog.at_level(logging.ERROR):
        unsaved.close()
    assert "1 failures were never stored" in caplog.text
    shelf.error = None
    unsaved.close()
    assert shelf.saved == ["a"]
    assert not any(thread.name == "tokenplane-failures" for thread in threading.enumerate())


def test_a_row_that_is_never_taken_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    unsaved = UnsavedFailures(shelf.save, retry_s=1000)
    unsaved.record(failure("a"))
    unsaved.record(failure("b"))
    shelf.error = InvalidKeyError("odd")
    with caplog.at_level(logging.ERROR):
        assert unsaved.flush() == 0
        unsaved.record(failure("c"))
    assert caplog.text.count("will never take") == 3
    assert unsaved.waiting("r") == []
    unsaved.close()


def test_beyond_its_bound_the_oldest_is_given_up_loudly(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    unsaved = UnsavedFailures(shelf.save, retry_s=1000, capacity=2)
    with caplog.at_level(logging.ERROR):
        for name in "abc":
            unsaved.record(failure(name))
    assert [f.model_call_id for f in unsaved.waiting("r")] == ["b", "c"]
    assert "given up" in caplog.text
    unsaved.close()
