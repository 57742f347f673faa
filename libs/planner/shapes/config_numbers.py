"""Whole numbers of a section of a config.json that the engine does not run, for its bytes only."""

from __future__ import annotations

from typing import Any

from slipstream.errors import InvalidArgument

_MOST = 2**31 - 1


class ConfigNumbers:
    """A section whose unknown keys do not matter: they change no byte that is counted here."""

    def __init__(self, raw: Any, path: str) -> None:
        if not isinstance(raw, dict):
            raise InvalidArgument(path.rstrip("."), f"not a JSON object: {raw!r}"[:200])
        self._raw = raw
        self._path = path

    def of(self, key: str, default: int | None = None) -> int:
        """Raises InvalidArgument that names the key."""
        value = self._raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= _MOST:
            raise InvalidArgument(
                f"{self._path}{key}", f"expected an integer from 1 to {_MOST}, got {value!r}"[:200]
            )
        return value

    def list_of(self, key: str) -> list[Any] | None:
        """The list, or None when it is not stated."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, list):
            raise InvalidArgument(f"{self._path}{key}", f"expected a list, got {value!r}"[:200])
        return value
