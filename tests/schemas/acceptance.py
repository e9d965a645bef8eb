"""Whether a wire model takes an input, whichever way it comes in."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError


def accepted(model: type[BaseModel], data: dict[str, Any]) -> bool:
    """Whether both ways in, from Python and from JSON, take it; they must agree."""
    ways = {_takes(model, data), _takes(model, json.dumps(data))}
    assert len(ways) == 1, data
    return ways.pop()


def _takes(model: type[BaseModel], data: dict[str, Any] | str) -> bool:
    try:
        if isinstance(data, str):
            model.model_validate_json(data)
        else:
            model.model_validate(data)
    except ValidationError:
        return False
    return True
