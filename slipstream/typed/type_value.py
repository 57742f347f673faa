"""JSON as a value of a Python type: the way back of slipstream/typed/type_schema.py. Pure."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import json
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from slipstream.errors import AnswerMismatch
from slipstream.typed.type_schema import (
    LISTS,
    MAPPINGS,
    UNIONS,
    described,
    is_pydantic,
    required_names,
    typed_fields,
)

KindT = TypeVar("KindT")

_TEXTS: Mapping[Any, Callable[[str], Any]] = {
    datetime.datetime: datetime.datetime.fromisoformat,
    datetime.date: datetime.date.fromisoformat,
    datetime.time: datetime.time.fromisoformat,
    uuid.UUID: uuid.UUID,
}
_NAMES = {
    str: "a string",
    bool: "true or false",
    type(None): "null",
    int: "a whole number",
    float: "a number",
}


def parse_json(kind: type[KindT], text: str) -> KindT:
    """The instance of the type that a JSON text states. Raises AnswerMismatch."""
    if is_pydantic(kind):
        return typing.cast("KindT", _by_pydantic(lambda: kind.model_validate_json(text)))  # type: ignore[attr-defined]
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AnswerMismatch(f"the answer is not JSON: {error}") from None
    return typing.cast("KindT", value_of(kind, data))


def value_of(kind: Any, data: Any, path: str = "") -> Any:
    """`data`, decoded JSON, as a value of the type. Raises AnswerMismatch that names the path."""
    kind, _ = described(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return data
    if kind in _NAMES:
        return _plain(kind, data, path)
    if origin is typing.Literal:
        return _listed(arguments, data, path)
    if origin in UNIONS:
        return _first_of(arguments, data, path)
    if kind in LISTS or origin in LISTS:
        return _list(origin or kind, arguments, data, path)
    if origin is tuple:
        return _tuple(arguments, data, path)
    if kind in MAPPINGS or origin in MAPPINGS:
        inner = arguments[1] if arguments else Any
        items = _expect(data, dict, "an object", path).items()
        return {key: value_of(inner, item, _below(path, key)) for key, item in items}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_listed([member.value for member in kind], data, path))
    if kind in _TEXTS:
        return _from_text(kind, data, path)
    if is_pydantic(kind):
        return _by_pydantic(lambda: kind.model_validate(data))
    return _object(kind, data, path)


def json_text(value: Any) -> str:
    """A value as JSON text; a text stays as it is. Dataclasses, models, enums and dates are values too."""
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain_json)


def _plain_json(value: Any) -> Any:
    if is_pydantic(type(value)):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, collections.abc.Set | collections.abc.Sequence):
        return list(value)
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    return str(value)


def _plain(kind: Any, data: Any, path: str) -> Any:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if kind is int and is_number and (isinstance(data, int) or data.is_integer()):
        return int(data)
    if kind is float and is_number:
        return float(data)
    if kind not in (int, float) and isinstance(data, kind):
        return data
    raise _mismatch(path, _NAMES[kind], data)


def _listed(values: typing.Iterable[Any], data: Any, path: str) -> Any:
    for value in values:
        if value == data and isinstance(value, bool) == isinstance(data, bool):
            return value
    raise _mismatch(path, "one of the type's values", data)


def _first_of(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    """The value by the first type that takes it."""
    for kind in kinds:
        try:
            return value_of(kind, data, path)
        except AnswerMismatch:
            continue
    raise _mismatch(path, f"of one of {len(kinds)} types", data)


def _list(container: Any, arguments: tuple[Any, ...], data: Any, path: str) -> Any:
    inner = arguments[0] if arguments else Any
    items = enumerate(_expect(data, list, "a list", path))
    made = [value_of(inner, item, f"{path}[{index}]") for index, item in items]
    if container in (set, frozenset):
        return container(made)
    return frozenset(made) if container is collections.abc.Set else made


def _tuple(arguments: tuple[Any, ...], data: Any, path: str) -> Any:
    items = _expect(data, list, "a list", path)
    kinds = [arguments[0]] * len(items) if len(arguments) == 2 and arguments[1] is ... else list(arguments)
    if len(kinds) != len(items):
        raise _mismatch(path, f"a list of {len(kinds)}", data)
    pairs = enumerate(zip(kinds, items, strict=True))
    return tuple(value_of(kind, item, f"{path}[{index}]") for index, (kind, item) in pairs)


def _object(kind: Any, data: Any, path: str) -> Any:
    """An instance of a dataclass, or the keys of a TypedDict."""
    fields = typed_fields(kind)
    for name in _expect(data, dict, "an object", path):
        if name not in fields:
            raise AnswerMismatch(f"{_below(path, name)}: is not a field of {kind.__name__}")
    for name in required_names(kind):
        if name not in data:
            raise AnswerMismatch(f"{_below(path, name)}: is missing")
    values = {name: value_of(fields[name], item, _below(path, name)) for name, item in data.items()}
    if typing.is_typeddict(kind):
        return values
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:  # what its __post_init__ refuses
        raise AnswerMismatch(f"{path or 'the answer'}: {error}") from error


def _from_text(kind: Any, data: Any, path: str) -> Any:
    try:
        return _TEXTS[kind](_expect(data, str, "a string", path))
    except ValueError:
        raise _mismatch(path, f"a {kind.__name__}", data) from None


def _by_pydantic(validate: Callable[[], Any]) -> Any:
    try:
        return validate()
    except ValueError as error:  # pydantic's ValidationError is one
        raise AnswerMismatch(f"the answer is not valid: {error}") from error


def _expect(data: Any, kind: type, name: str, path: str) -> Any:
    if not isinstance(data, kind):
        raise _mismatch(path, name, data)
    return data


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mismatch(path: str, expected: str, data: Any) -> AnswerMismatch:
    return AnswerMismatch(f"{path or 'the answer'}: must be {expected}, not {json.dumps(data)[:60]}")
