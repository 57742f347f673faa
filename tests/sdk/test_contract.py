"""The rules of units and of closed sets, for every field of the contract."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

import slipstream.v1


def _messages(descriptors: Iterator[Descriptor]) -> Iterator[Descriptor]:
    for message in descriptors:
        yield message
        yield from _messages(iter(message.nested_types))


def _fields() -> Iterator[FieldDescriptor]:
    for module in pkgutil.iter_modules(slipstream.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"slipstream.v1.{module.name}").DESCRIPTOR
            for message in _messages(iter(file.message_types_by_name.values())):
                yield from message.fields


def test_durations_are_milliseconds_and_points_in_time_are_doubles() -> None:
    fields = [field for field in _fields() if field.name.endswith("_s") and not field.name.endswith("_per_s")]
    assert len(fields) > 5
    assert [
        field.full_name
        for field in fields
        if not field.name.endswith("_unix_s") or field.type != FieldDescriptor.TYPE_DOUBLE
    ] == []


# Texts for people, and names that a later version may add to.
_OPEN_SETS = {
    "slipstream.v1.Failure.reason",
    "slipstream.v1.RequestStats.reason",
    "slipstream.v1.TierRecommendation.reason",
}
_CLOSED_SET = re.compile(
    r"(^|_)(code|dtype|kind|mode|phase|policy|priority|purpose|reason|role|signal|state|status|tier|transport"
    r"|type)(s|es|ies)?$"
)


def test_a_closed_set_is_an_enum() -> None:
    named = [field for field in _fields() if _CLOSED_SET.search(field.name)]
    assert sum(field.type == FieldDescriptor.TYPE_ENUM for field in named) > 15
    texts = {field.full_name for field in named if field.type == FieldDescriptor.TYPE_STRING}
    assert texts == _OPEN_SETS


def test_the_first_value_of_an_enum_is_unspecified() -> None:
    enums = {field.enum_type.full_name: field.enum_type for field in _fields() if field.enum_type}
    assert len(enums) > 15
    assert [name for name, enum in enums.items() if not enum.values[0].name.endswith("_UNSPECIFIED")] == []
