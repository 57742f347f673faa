"""Decodes JSON bodies into msgspec structs and names the first defect of a body that does not fit. Pure.

    _DECODER = msgspec.json.Decoder(ChatBody)
    body = decode_body(data, _DECODER, ignored.add)  # InvalidArgument: "messages[0].role: must be a string"

Nearly all bodies fit, and msgspec decodes them in one pass. `decode_body` parses any other body once more
with the standard library, which reads what msgspec refuses (NaN, numbers beyond a double, lone surrogates).
It compares the result with the struct's annotations. Error messages therefore do not depend on msgspec's
wording. Unknown fields are left out, and `ignore` gets the path of each; a struct's `REFUSED` lists
exceptions.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from services.router.request.json_limits import check_structure
from slipstream import bounds
from slipstream.bound import shown_name

T = TypeVar("T", bound=msgspec.Struct)
Json = Mapping[str, Any]
Ignore = Callable[[str], None]

# What a field may hold besides null; 2.0 is read as the whole number 2.
Text: TypeAlias = str | None
Flag: TypeAlias = bool | None
Number: TypeAlias = int | float | None
WholeNumber: TypeAlias = int | None
# An id, which some servers count.
Identifier: TypeAlias = str | int | None
# A field of OpenAI's API that has no effect here: anything but null is refused as unsupported.
NoEffect: TypeAlias = None


class _Shape(NamedTuple):
    """The types that a field's JSON value may have (none: any); `inner`: of its object or of each item."""

    words: str
    types: tuple[type, ...]
    inner: type[msgspec.Struct] | None = None


_SHAPES: Mapping[object, _Shape] = {
    Text: _Shape("a string", (str,)),
    Flag: _Shape("true or false", (bool,)),
    Number: _Shape("a number", (int, float)),
    WholeNumber: _Shape("a whole number", (int,)),
    Identifier: _Shape("a string", (str, int)),
    Any: _Shape("", ()),
    NoneType: _Shape("", (NoneType,)),
}


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T], ignore: Ignore) -> T:
    """The body as the decoder's struct. Raises InvalidArgument naming the first defect."""
    check_structure([("body", body)])
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return read_object(parse_object(body), decoder.type, ignore)


def read_object(given: object, kind: type[T], ignore: Ignore, path: str = "") -> T:
    """Parsed JSON as a struct. Raises InvalidArgument naming the first defect."""
    return msgspec.convert(_checked(given, kind, ignore, path), kind)


def path_of(path: str, name: str) -> str:
    """The path of a field of the object at `path`; a name that is no identifier is shortened."""
    safe = shown_name(name)
    return f"{path}.{safe}" if path else safe


def text_of(item: Json, name: str, path: str) -> str:
    """A field of the object at `path`, which must be a string. Raises InvalidArgument."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bounds.TYPE.refused(f"{path}.{name}", expected="a string")
    return value


def check_no_effect(name: str, item: object, allowed: tuple[object, ...], path: str = "") -> None:
    """Raises InvalidArgument unless a field without effect is null or holds a value that asks for nothing."""
    if item is not None and item not in allowed:
        raise bounds.UNSUPPORTED.refused(path_of(path, name))


def parse_object(body: bytes) -> dict[str, Any]:
    """The object of a body as the standard library reads it. Raises InvalidArgument naming the defect."""
    try:
        parsed: object = json.loads(_as_text(body))
        where = _find_surrogate(parsed)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        reason = error.msg[:1].lower() + error.msg[1:].removesuffix(" at")
        raise bounds.BODY_JSON.refused(reason=reason, at=at) from error
    except RecursionError as error:
        raise bounds.BODY_JSON.refused(reason="nested too deep", at="its beginning") from error
    except ValueError as error:  # a number of more digits than int() reads
        raise bounds.BODY_FORMAT.refused() from error
    if where is not None:
        raise bounds.UTF8.refused(where or "body")
    if not isinstance(parsed, dict):
        raise bounds.BODY_FORMAT.refused()
    return parsed


def _as_text(body: bytes) -> str:
    """The body, with the first byte that is no UTF-8 as a lone surrogate, which escapes make as well.

    All bytes after it are one character each, so that the structure stays: replacing each one is slow.
    """
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        good, rest = body[: error.start], body[error.start + 1 :]
        return good.decode() + "\udc80" + rest.decode("latin-1")


def _find_surrogate(value: object) -> str | None:
    """The path of the first string with a lone surrogate, which no UTF-8 can hold.

    The path is made on the way back: one for each value would copy a long name for each value below it.
    """
    if isinstance(value, str):
        return "" if _has_surrogate(value) else None
    if isinstance(value, dict):
        if any(map(_has_surrogate, value)):
            return ""
        for key, item in value.items():
            if (found := _find_surrogate(item)) is not None:
                return _joined(shown_name(key), found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if (found := _find_surrogate(item)) is not None:
                return _joined(f"[{index}]", found)
    return None


def _joined(step: str, rest: str) -> str:
    return f"{step}.{rest}" if rest and rest[0] != "[" else step + rest


def _has_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


@functools.cache
def _shapes_of(kind: type[msgspec.Struct]) -> Mapping[str, _Shape]:
    return {field.encode_name: _shape_of(field.type) for field in msgspec.structs.fields(kind)}


def _shape_of(annotation: Any) -> _Shape:
    if annotation in _SHAPES:
        return _SHAPES[annotation]
    (given,) = (part for part in get_args(annotation) if part is not NoneType)
    if get_origin(given) is list:
        (item,) = get_args(given)
        return _Shape("a list", (list,), None if item is Any else item)
    return _Shape("an object", (dict,), None if get_origin(given) is dict else given)


def _checked(given: object, kind: type[msgspec.Struct], ignore: Ignore, path: str) -> Json:
    """The object with whole numbers as ints, without the fields that `ignore` gets.

    Of several defects, an unsupported field comes first, then a wrong type, then one further in.
    """
    if not isinstance(given, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    shapes = _shapes_of(kind)
    refused: Mapping[str, tuple[object, ...]] = getattr(kind, "REFUSED", {})
    for name, item in given.items():
        if name in refused:
            check_no_effect(name, item, refused[name], path)
        elif name not in shapes:
            ignore(path_of(path, name))
        elif shapes[name].types == (NoneType,):
            check_no_effect(name, item, (), path)
    known = [(name, item) for name, item in given.items() if name in shapes]
    checked = {name: _typed(item, shapes[name], path_of(path, name)) for name, item in known}
    for name, item in checked.items():
        inner, where = shapes[name].inner, path_of(path, name)
        if inner is None or item is None:
            continue
        if isinstance(item, list):
            checked[name] = [_checked(each, inner, ignore, f"{where}[{i}]") for i, each in enumerate(item)]
        else:
            checked[name] = _checked(item, inner, ignore, where)
    return checked


def _typed(item: Any, shape: _Shape, path: str) -> Any:
    if item is None or not shape.types or type(item) in shape.types:
        return item
    if shape.types != (int,) or type(item) is not float:
        raise bounds.TYPE.refused(path, expected=shape.words)
    if not (math.isfinite(item) and item.is_integer()):
        raise bounds.TYPE.refused(path, expected=shape.words)
    return int(item)
