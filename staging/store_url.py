"""A store URL taken apart, with typed options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tokenplane.schemas.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
# Whatever stands where a login may stand, also in a journal's URL within a URL, also encoded. A
# Redis password may hold any character by mistake; elsewhere a path may hold an "@" of its own.
_LOGINS = (
    (re.compile(r"(?i)(\brediss?(?::|%3a)(?:/|%2f){2}).*(@|%40)", re.DOTALL), r"\1***\2"),
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/?#@]*@"), r"\1***@"),
    (re.compile(r"(?i)([?&](?:username|password)=)[^&]*"), r"\1***"),
)


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """One URL. Text without a scheme is the path of a file store, taken as it is."""

    text: str
    scheme: str
    rest: str
    """What stands between the scheme and the query, still percent-encoded."""
    query: dict[str, str] = field(default_factory=dict)

    def options(self, **parsers: Callable[[str], Any]) -> dict[str, Any]:
        """The query's options, converted; only those that are given.

        Raises:
            ConfigError: an option that ``parsers`` does not know, or a value it refuses.
        """
        unknown = sorted(self.query.keys() - parsers.keys())
        if unknown:
            raise ConfigError(
                f"unknown options in {shown_url(self.text)}", expected=sorted(parsers), got=unknown
            )
        values = {}
        for name, text in self.query.items():
            try:
                values[name] = parsers[name](text)
            except ValueError as exc:
                raise ConfigError(
                    f"option {name} of {shown_url(self.text)}", got=repr(text)
                ) from exc
        return values


def parse_store_url(url: str) -> StoreUrl:
    """The parts of ``url``.

    Raises:
        ConfigError: empty, or an option is given twice.
    """
    if not isinstance(url, str) or not url or "\0" in unquote(url):
        raise ConfigError("expected a store URL", got=repr(url))
    match = _SCHEME.match(url)
    if match is None:
        return StoreUrl(url, "", url)
    scheme = match[1].lower()
    try:
        split = urlsplit(url)
    except ValueError as exc:
        raise ConfigError(f"a malformed store URL: {exc}", got=repr(shown_url(url))) from exc
    pairs = parse_qsl(split.query, keep_blank_values=True)
    query = dict(pairs)
    if len(query) != len(pairs):
        raise ConfigError("an option is given twice", got=shown_url(url))
    return StoreUrl(url, scheme, url[match.end() :].partition("?")[0], query)


def shown_url(url: str) -> str:
    """The URL as logs, answers and errors may show it: without a user and a password."""
    for pattern, replacement in _LOGINS:
        url = pattern.sub(replacement, url)
    return url


def positive_int(text: str) -> int:
    """Raises:
    ValueError: not an integer above zero.
    """
    value = int(text)
    if value <= 0:
        raise ValueError("expected a positive integer")
    return value


def seconds(text: str) -> float:
    """Raises:
    ValueError: not a finite number of seconds, zero or more.
    """
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("expected seconds")
    return value


def positive_seconds(text: str) -> float:
    """Raises:
    ValueError: not a finite number of seconds above zero.
    """
    value = seconds(text)
    if value == 0:
        raise ValueError("expected more than no time")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that lets only ``choices`` through."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected one of {choices}")
        return text

    return parse
