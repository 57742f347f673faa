"""The rules of units that common.proto states, for every field of the contract."""

from __future__ import annotations

import importlib
import pkgutil
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
