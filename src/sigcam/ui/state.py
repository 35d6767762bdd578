"""Values of controls as browsers send them, and the page's state as the query of a link."""

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from sigcam.core.errors import DataError

LINK_KEYS = ("class", "head", "method", "scale", "threshold", "delta", "example")
MAX_QUERY, MAX_VALUE, MAX_VALUES = 8000, 200, 12  # characters, characters of a value, values of a key

LinkState = dict[str, Sequence[str] | float]  # by key; "" is left out


def slider_value(value: Any, low: float, high: float, default: float) -> float:
    """Return the number of a slider, within its limits; the default while its field is empty."""
    if value is None:
        return default
    if not isinstance(value, int | float) or math.isnan(value):
        raise DataError("a slider takes numbers only.")
    return float(min(max(value, low), high))


def link_query(state: LinkState) -> str:
    """Return the query of a link to a state."""
    return "?" + urlencode({key: state[key] for key in LINK_KEYS if state[key] != ""}, doseq=True)


def read_link(query: object) -> dict[str, list[str]]:
    """Return the values of each key in an address, which anybody may have written: unknown keys, and values
    that are too long or too many, are left out."""
    values: dict[str, list[str]] = {key: [] for key in LINK_KEYS}
    if isinstance(query, str) and len(query) <= MAX_QUERY:
        for key, value in parse_qsl(query.removeprefix("?")):
            if len(value) <= MAX_VALUE and len(values.get(key, [""] * MAX_VALUES)) < MAX_VALUES:
                values[key].append(value)
    return values


def link_number(values: list[str], low: float, high: float, default: float) -> float:
    """Return the number that a link gives for a slider; the default for anything else."""
    try:
        return slider_value(float(values[0]), low, high, default)
    except (IndexError, ValueError, DataError):
        return default
