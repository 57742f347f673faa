"""Every call of a service, from its descriptor, with random requests."""

from __future__ import annotations

import os
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from slipstream.v1 import common_pb2
from tests.kvstore.node import FINGERPRINT

HASHES = st.one_of(st.binary(max_size=40), st.builds(lambda n: os.urandom(16 * n), st.integers(0, 9)))
U64 = st.sampled_from([0, 1, 4096, 2**31, 2**32, 2**63, 2**64 - 1])
U32 = st.sampled_from([0, 1, 2, 100_000, 2**31, 2**32 - 1])
FINGERPRINTS = st.sampled_from([FINGERPRINT, common_pb2.Fingerprint()])
MAX_REPEATED, MAX_DEPTH = 3, 4

Values = dict[str, st.SearchStrategy[Any]]


def methods(service: ServiceDescriptor) -> list[MethodDescriptor]:
    """All calls of the service."""
    return list(service.methods)


def messages(descriptor: Descriptor, words: st.SearchStrategy[str], depth: int = 0) -> st.SearchStrategy[Any]:
    """Draw any message of the type, with or without optional fields. `words` are values of strings."""
    if descriptor.full_name == "slipstream.v1.Fingerprint":
        return FINGERPRINTS
    fields = [field for field in descriptor.fields if depth < MAX_DEPTH or field.message_type is None]
    values: Values = {field.name: _value(field, words, depth) for field in fields}
    alternatives = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs]
    chosen = st.tuples(*(st.sampled_from([*names, ""]) for names in alternatives))

    def of(chosen_names: tuple[str, ...]) -> st.SearchStrategy[Any]:
        in_oneofs = {name for names in alternatives for name in names}
        used = [name for name in values if name not in in_oneofs or name in chosen_names]
        return st.builds(
            GetMessageClass(descriptor), **{name: values[name] for name in used if name in values}
        )

    return chosen.flatmap(of)


def _value(field: FieldDescriptor, words: st.SearchStrategy[str], depth: int) -> st.SearchStrategy[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = (_value(entry.fields_by_name[name], words, depth) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=MAX_REPEATED)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        assert field.message_type is not None
        one: st.SearchStrategy[Any] = messages(field.message_type, words, depth + 1)
    else:
        one = {
            FieldDescriptor.TYPE_BYTES: HASHES,
            FieldDescriptor.TYPE_STRING: words,
            FieldDescriptor.TYPE_UINT32: U32,
            FieldDescriptor.TYPE_UINT64: U64,
            FieldDescriptor.TYPE_FIXED64: U64,
            FieldDescriptor.TYPE_BOOL: st.booleans(),
            FieldDescriptor.TYPE_ENUM: st.integers(0, 9),
        }[field.type]  # a KeyError asks for the values of a new field type
    return st.lists(one, max_size=MAX_REPEATED) if field.is_repeated else one


async def ask(channel: Any, method: MethodDescriptor, requests: list[Any], *, answers: int) -> list[Any]:
    """Return the first `answers` messages of the call. Raises AioRpcError."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = (
        "stream" if method.client_streaming else "unary",
        "stream" if method.server_streaming else "unary",
    )
    call = getattr(channel, "_".join(kind))(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    running = call(iter(requests) if method.client_streaming else requests[0], timeout=60)
    if not method.server_streaming:
        return [await running]
    found: list[Any] = []
    try:
        async for answer in running:
            found.append(answer)
            if len(found) == answers:
                break
    finally:
        running.cancel()
    return found
