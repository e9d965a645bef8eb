"""What a settings model found wrong, as this project's error; and how long a timeout may be."""

from __future__ import annotations

from pydantic import ValidationError

from tokenplane.schemas.errors import ConfigError

LONGEST_TIMEOUT_S = 31_536_000.0
"""A year. Threads and sockets refuse to wait for what is much longer, or for ever."""

_SHOWN = 80


def config_error(error: ValidationError) -> ConfigError:
    """The first complaint, its key and what came. The value of an unknown key is not shown: it may
    be a secret that was put into the wrong place."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    hidden = first["type"] == "extra_forbidden" or isinstance(first["input"], dict)
    return ConfigError(
        f"{name}: {first['msg']}" if name else first["msg"],
        key=name or None,
        got=None if hidden else repr(first["input"])[:_SHOWN],
    )
