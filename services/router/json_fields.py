"""Typed reading of JSON objects with the path of what is wrong. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from typing import Any

from libs.common import bounds
from libs.common.bound import shown_name

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Fields:
    """One JSON object. Getters return None for a field that is left out or null.

    `known` names the fields allowed (None: any); `no_effect` those that are allowed only with one of
    the given values or null, because they ask for something that is not supported.
    """

    def __init__(
        self,
        value: Mapping[str, Any],
        *,
        known: Collection[str] | None,
        no_effect: Mapping[str, tuple[object, ...]] | None = None,
        path: str = "",
    ) -> None:
        self._value = value
        self._path = path
        for name, given in value.items():
            if no_effect and name in no_effect:
                if given is not None and given not in no_effect[name]:
                    raise bounds.UNSUPPORTED.refused(self.path_of(name))
            elif known is not None and name not in known:
                raise bounds.UNKNOWN_FIELD.refused(self.path_of(name))

    @classmethod
    def of(
        cls,
        value: object,
        path: str,
        *,
        known: Collection[str] | None,
        no_effect: Mapping[str, tuple[object, ...]] | None = None,
    ) -> Fields:
        """`value` read as an object. Raises InvalidArgument when it is none."""
        if not isinstance(value, dict):
            raise bounds.TYPE.refused(path, expected="an object")
        return cls(value, known=known, no_effect=no_effect, path=path)

    def path_of(self, name: str) -> str:
        """The path of a field; a name that is no identifier is shortened."""
        safe = shown_name(name)
        return f"{self._path}.{safe}" if self._path else safe

    def names(self) -> KeysView[str]:
        """Names of the fields that are there."""
        return self._value.keys()

    def get(self, name: str) -> Any:
        """The value as parsed."""
        return self._value.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise bounds.TYPE.refused(self.path_of(name), expected="a string")
        return value

    def boolean(self, name: str) -> bool | None:
        """true or false."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, bool):
            raise bounds.TYPE.refused(self.path_of(name), expected="true or false")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number; 2.0 counts as 2."""
        value = self.number(name)
        if value is None or isinstance(value, int):
            return value
        if not (math.isfinite(value) and value.is_integer()):
            raise bounds.TYPE.refused(self.path_of(name), expected="a whole number")
        return int(value)

    def number(self, name: str) -> float | None:
        """A number; NaN and Infinity, which Python's JSON reads, are left to the bounds."""
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bounds.TYPE.refused(self.path_of(name), expected="a number")
        return value

    def array(self, name: str) -> Sequence[Any] | None:
        """A list."""
        value = self._value.get(name)
        if value is not None and not isinstance(value, list):
            raise bounds.TYPE.refused(self.path_of(name), expected="a list")
        return value

    def object(self, name: str, *, known: Collection[str] | None) -> Fields | None:
        """An object with these fields."""
        value = self._value.get(name)
        return None if value is None else Fields.of(value, self.path_of(name), known=known)


def find_surrogate(value: object, path: str = "") -> str | None:
    """Path of the first string with a lone surrogate, which no UTF-8 can hold; None: all is well."""
    if isinstance(value, str):
        # isascii is a flag of the string: most text costs nothing here.
        return path if not value.isascii() and _LONE_SURROGATE.search(value) else None
    children: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        for key in value:
            if find_surrogate(key) is not None:
                return path
        children = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    for where, item in children:
        found = find_surrogate(item, where)
        if found is not None:
            return found
    return None
