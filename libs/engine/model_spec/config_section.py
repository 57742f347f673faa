"""One section of a config.json: the table of its keys, and typed reads with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import InvalidArgument

# The kernels count in 32 bits.
_MAX_INTEGER = 2**31 - 1
_SHOWN_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys that a section may have.

    used     the engine reads the key
    without_effect  the key changes no answer; the text states why
    fixed    the supported values of the key, and the reason
    """

    used: frozenset[str]
    without_effect: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    def check(self, raw: Mapping[str, Any], path: str) -> None:
        """Raise InvalidArgument for the first key that is unknown or has an unsupported value.

        A null means "not stated", as in transformers.
        """
        for key, value in raw.items():
            if value is None or key in self.used or key in self.without_effect:
                continue
            if key not in self.fixed:
                raise InvalidArgument(
                    f"{path}{key}",
                    f"unknown key with the value {_shown(value)}, which may change the model's answers; "
                    "libs/engine/model_spec/known_keys.py lists the known keys",
                )
            supported, reason = self.fixed[key]
            if value not in supported:
                listed = " or ".join(_shown(entry) for entry in supported) or "null"
                raise InvalidArgument(
                    f"{path}{key}", f"{_shown(value)} is not supported: {reason}; supported: {listed}"
                )


class ConfigSection:
    """A section whose keys are checked against its table. `path` precedes each key in errors."""

    def __init__(self, raw: Any, table: KeyTable, path: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise InvalidArgument(path.rstrip(".") or "config.json", f"not a JSON object: {_shown(raw)}")
        table.check(raw, path)
        self._raw = raw
        self.path = path

    def get(self, key: str) -> Any:
        """The value, or None when it is not stated."""
        return self._raw.get(key)

    def refusal(self, key: str, reason: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}{key}", reason)

    def spelling(self, *names: str) -> str:
        """The name of several for one key that is stated; the first when none is.

        Raises InvalidArgument when two of them state different values.
        """
        stated = [name for name in names if self.get(name) is not None]
        for name in stated[1:]:
            if self.get(name) != self.get(stated[0]):
                raise self.refusal(
                    name, f"{_shown(self.get(name))} contradicts {stated[0]} {_shown(self.get(stated[0]))}"
                )
        return stated[0] if stated else names[0]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refusal(key, "missing from config.json")
        if type(value) is not int or not minimum <= value <= _MAX_INTEGER:
            raise self.refusal(
                key, f"expected an integer from {minimum} to {_MAX_INTEGER}, got {_shown(value)}"
            )
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refusal(key, "missing from config.json, or null")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, f"expected a number, got {_shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= above:
            bound = "" if above == -math.inf else f" above {above:g}"
            raise self.refusal(key, f"expected a finite number{bound}, got {_shown(value)}")
        return number

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(key, f"expected true or false, got {_shown(value)}")
        return value

    def agrees(self, key: str, expected: int, why: str) -> None:
        """Raise InvalidArgument unless the key is not stated or has the only supported value."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or value != expected):
            raise self.refusal(key, f"{_shown(value)} is not supported: {why}; supported: {expected}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
