"""Bytes that may be a message: boundary values, valid messages with a few of them, and damage."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

F = FieldDescriptor
_UNSIGNED = {F.TYPE_UINT32: 32, F.TYPE_FIXED32: 32, F.TYPE_UINT64: 64, F.TYPE_FIXED64: 64}
_SIGNED = {
    F.TYPE_INT32: 32,
    F.TYPE_SINT32: 32,
    F.TYPE_SFIXED32: 32,
    F.TYPE_INT64: 64,
    F.TYPE_SINT64: 64,
    F.TYPE_SFIXED64: 64,
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, 2.5, -1.0, 1e-45, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    *("", "a", "r-1", "user", "127.0.0.1:1", "127.0.0.1:99999", "\x00", "\n\r\t", "é" * 300, "😀", "\ufffd"),
    *("x" * 129, "q" * 20_000, "../../etc/passwd", "%s%n", "{}", "[" * 5000, '{"type":"object"}', "\ud7ff"),
    *("<|im_end|>", "[::1]:0", "unix:/tmp/none", "dns:///localhost:1", "(" * 600, "1e999", "-1", "null"),
)
_LENGTHS = (0, 1, 3, 4, 15, 16, 17, 32, 64, 256, 1000)
_MAX_REPEATED, _MAX_DEPTH = 3, 5
_LEN, _VARINT = 2, 0


class MessageFuzzer:
    """Draws from a seeded generator. `seeds` are valid messages, also of nested types."""

    def __init__(self, rng: random.Random, seeds: Sequence[Message] = ()) -> None:
        self._rng = rng
        self._seeds: dict[str, list[Message]] = {}
        for seed in seeds:
            self.add_seed(seed)

    def add_seed(self, message: Message) -> None:
        """Use the message and its parts as beginnings of others."""
        known = self._seeds.setdefault(message.DESCRIPTOR.full_name, [])
        if len(known) < 100:
            known.append(message)
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            for part in value if field.is_repeated else (value,):
                self.add_seed(part)

    def data(self, descriptor: Descriptor) -> bytes:
        """An input for a method that takes this message."""
        rng = self._rng
        data: bytes = self.message(descriptor).SerializeToString()
        kind = rng.random()
        if kind < 0.6:
            return data
        if kind < 0.95:
            return self._damaged(data)
        return rng.randbytes(rng.choice(_LENGTHS))

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message of the type: valid, nearly valid, or of any values."""
        rng = self._rng
        message: Message = GetMessageClass(descriptor)()
        seeds = self._seeds.get(descriptor.full_name)
        fields = list(descriptor.fields)
        if seeds and rng.random() < 0.8:
            message.CopyFrom(rng.choice(seeds))
            fields = rng.sample(fields, min(len(fields), rng.choice((0, 0, 1, 1, 2))))
        else:
            fields = [field for field in fields if rng.random() < 0.6]
        for field in fields:
            self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: F, depth: int) -> None:
        rng, kind = self._rng, field.message_type
        if kind is not None and depth >= _MAX_DEPTH:
            return
        message.ClearField(field.name)
        if kind is not None and kind.GetOptions().map_entry:
            of_map: Any = getattr(message, field.name)
            for _ in range(rng.randint(0, _MAX_REPEATED)):
                key = self._value(kind.fields_by_name["key"])
                if kind.fields_by_name["value"].message_type is None:
                    of_map[key] = self._value(kind.fields_by_name["value"])
        elif field.is_repeated:
            size = rng.choice((0, 1, 2, _MAX_REPEATED, 40)) if depth < 2 else rng.randint(0, 1)
            items: Any = getattr(message, field.name)
            items.extend(
                self._value(field) if kind is None else self.message(kind, depth + 1) for _ in range(size)
            )
        elif kind is not None:
            getattr(message, field.name).CopyFrom(self.message(kind, depth + 1))
        elif rng.random() < 0.9:
            setattr(message, field.name, self._value(field))

    def _value(self, field: F) -> Any:
        rng = self._rng
        if field.type in _UNSIGNED:
            end = 1 << _UNSIGNED[field.type]
            return rng.choice((0, 1, 2, 3, 64, 1000, end // 2, end - 1, rng.randrange(end)))
        if field.type in _SIGNED:
            end = 1 << (_SIGNED[field.type] - 1)
            return rng.choice((0, 1, -1, 64, end - 1, -end, rng.randrange(-end, end)))
        if field.type in (F.TYPE_FLOAT, F.TYPE_DOUBLE):
            return rng.choice(_FLOATS)
        if field.type == F.TYPE_BOOL:
            return rng.random() < 0.5
        if field.type == F.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 99, -1, (1 << 31) - 1))
        if field.type == F.TYPE_STRING:
            return rng.choice(_TEXTS)
        assert field.type == F.TYPE_BYTES, field.full_name
        return rng.randbytes(rng.choice(_LENGTHS))

    def _damaged(self, data: bytes) -> bytes:
        """Damage that a parser meets: flips, cuts, wrong lengths, unknown fields, invalid UTF-8."""
        rng, damaged = self._rng, bytearray(data)
        for _ in range(rng.randint(1, 3)):
            kind = rng.randrange(7)
            at = rng.randrange(len(damaged) + 1)
            if kind == 0 and at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del damaged[at:]
            elif kind == 2:
                damaged[at:at] = rng.randbytes(rng.randint(1, 8))
            elif kind == 3:  # an unknown field
                damaged += varint(rng.randint(1, 5000) << 3 | _VARINT) + varint(rng.getrandbits(64))
            elif kind == 4:  # a length beyond the end
                damaged += varint(rng.randint(1, 20) << 3 | _LEN) + varint(rng.choice((1, 1 << 31, 1 << 40)))
            elif kind == 5:  # a field of another type, or text that is no UTF-8
                damaged += varint(rng.randint(1, 20) << 3 | _LEN) + b"\x02\xc3\x28"
            else:  # groups, and types that do not exist
                damaged += varint(rng.randint(1, 20) << 3 | rng.randint(3, 7)) + struct.pack("<I", at)
        return bytes(damaged)


def metadata(rng: random.Random, values: Mapping[str, Sequence[str | bytes]]) -> tuple[tuple[str, Any], ...]:
    """Metadata of a call: some of the names with one of their values."""
    return tuple((name, rng.choice(of_name)) for name, of_name in values.items() if rng.random() < 0.3)


def varint(value: int) -> bytes:
    """The number as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
