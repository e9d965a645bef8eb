"""How a command begins and ends: its parser; its errors as one clear line and an exit status."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Protocol

from tokenplane.schemas.errors import ConfigError, TokenplaneError
from tokenplane.staging.store_url import positive_int
from tokenplane.tools.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE


def command_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of ``tokenplane NAME``, explained by the first line of its module's docstring."""
    summary = (doc or "").partition("\n")[0].partition(": ")[2]
    return argparse.ArgumentParser(
        prog=f"tokenplane {name}", description=summary[:1].upper() + summary[1:]
    )


def at_least_one(text: str) -> int:
    """A number of things, as an argument.

    Raises:
        argparse.ArgumentTypeError: not an integer above zero.
    """
    try:
        return positive_int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}") from None


def zero_or_more(text: str) -> int:
    """A version or a count that may be 0, as an argument.

    Raises:
        argparse.ArgumentTypeError: not an integer, or below zero.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)


class Main(Protocol):
    """A command: its arguments (None: those of the process) to its exit status."""

    def __call__(self, argv: list[str] | None = None) -> int: ...


def coded_errors(name: str) -> Callable[[Main], Main]:
    """Turn the errors that leave a command's ``main`` into one line and a status.

    ``ConfigError`` is wrong usage (2); every other error of ours, and what the operating system
    refuses, is a failure (1). Anything else is a defect and keeps its traceback.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def wrapped(argv: list[str] | None = None) -> int:
            _open_streams()
            try:
                status = main(argv)
                sys.stdout.flush()
            except TokenplaneError as error:
                _say(name, error.code, str(error))
                return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
            except BrokenPipeError:
                # Whoever read us has seen enough (`| head`); what is buffered goes nowhere.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return EXIT_FAILED
            except OSError as error:
                _say(name, "os_error", str(error))
                return EXIT_FAILED
            except KeyboardInterrupt:
                _say(name, "interrupted", "stopped by the user")
                return EXIT_INTERRUPTED
            return status

        return wrapped

    return decorate


def _open_streams() -> None:
    """Where a shell closed stdout or stderr (``>&-``), what is said goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _say(name: str, code: str, message: str) -> None:
    print(f"tokenplane {name}: {code}: {message}", file=sys.stderr)
