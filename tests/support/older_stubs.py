"""Stubs of the wire contract as it was: with them today's code speaks and understands no more than then.

`older_protos/` is the contract's first version, kept as it was. What came later is not removed from the
stubs, for the code names it, but moved on the wire to where no peer looks: fields to other numbers, methods
and services to other names. A peer's later fields are unknown to such a process, and its own to the peer.
"""

from __future__ import annotations

import os
from pathlib import Path

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[2] / "protos"
OLDER_PROTOS = Path(__file__).with_name("older_protos")
_MOVED_BY = 10_000
_LATER = "Later"

_Message = descriptor_pb2.DescriptorProto
_Files = dict[str, descriptor_pb2.FileDescriptorProto]


def build_older_stubs(out: Path) -> list[str]:
    """Write them to `out`/slipstream/v1; returns the full names of what they do not speak.

    Raises AssertionError when a field of then is another one now: old and new could not talk.
    """
    now, then = _files(PROTOS, out / "now.bin"), _files(OLDER_PROTOS, out / "then.bin")
    moved: list[str] = []
    methods: dict[str, list[tuple[str, str]]] = {}  # by file: text to replace in its gRPC stubs
    for name, file in now.items():
        old_messages = _messages(then[name]) if name in then else {}
        for full_name, message in _messages(file).items():
            if full_name in old_messages:
                moved += [f"{full_name}.{f}" for f in _move_fields(message, old_messages[full_name])]
        methods[name] = _renamed_methods(file, then.get(name), moved)
    changed = out / "changed.bin"
    changed.write_bytes(descriptor_pb2.FileDescriptorSet(file=now.values()).SerializeToString())
    targets = [name for name in now if name.startswith("slipstream/v1/")]
    _protoc(f"--descriptor_set_in={changed}", f"--python_out={out}", f"--grpc_python_out={out}", *targets)
    for name in targets:
        stubs = out / name.replace(".proto", "_pb2_grpc.py")
        text = stubs.read_text()
        for old, new in methods[name]:
            assert old in text
            text = text.replace(old, new)
        stubs.write_text(text)
    (out / "slipstream" / "v1" / "__init__.py").touch()
    return moved


def _move_fields(message: _Message, old: _Message) -> list[str]:
    known = {field.name: field for field in old.field}
    later = [field for field in message.field if field.name not in known]
    for field in message.field:
        if field.name in known:
            before = known[field.name]
            same = (field.number, field.type, field.label) == (before.number, before.type, before.label)
            assert same, f"{message.name}.{field.name} changed on the wire"
    for field in later:
        assert field.number not in {f.number for f in old.field}, f"{message.name}.{field.name} took a number"
        field.number += _MOVED_BY
    return [field.name for field in later]


def _renamed_methods(
    file: descriptor_pb2.FileDescriptorProto,
    old: descriptor_pb2.FileDescriptorProto | None,
    moved: list[str],
) -> list[tuple[str, str]]:
    known = {service.name: service for service in old.service} if old is not None else {}
    replaced = []
    for service in file.service:
        name = f"{file.package}.{service.name}"
        if service.name not in known:
            moved.append(name)
            replaced.append((f"{name}", f"{name}{_LATER}"))
            continue
        before = {method.name for method in known[service.name].method}
        for method in service.method:
            if method.name not in before:
                moved.append(f"{name}.{method.name}")
                replaced.append((f"/{name}/{method.name}'", f"/{name}/{_LATER}{method.name}'"))
                replaced.append((f"'{method.name}': grpc", f"'{_LATER}{method.name}': grpc"))
    return replaced


def _messages(file: descriptor_pb2.FileDescriptorProto) -> dict[str, _Message]:
    found: dict[str, _Message] = {}

    def walk(message: _Message, scope: str) -> None:
        name = f"{scope}.{message.name}"
        found[name] = message
        for nested in message.nested_type:
            walk(nested, name)

    for message in file.message_type:
        walk(message, file.package)
    return found


def _files(folder: Path, out: Path) -> _Files:
    sources = sorted(str(path.relative_to(folder)) for path in (folder / "slipstream" / "v1").glob("*.proto"))
    _protoc(f"-I{folder}", f"--descriptor_set_out={out}", "--include_imports", *sources)
    files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return {file.name: file for file in files}


def _protoc(*arguments: str) -> None:
    includes = Path(grpc_tools.__file__).parent / "_proto"
    given = [] if any(a.startswith("--descriptor_set_in") for a in arguments) else [f"-I{includes}"]
    status = protoc.main(["protoc", *given, *arguments])
    assert status == 0, f"protoc {os.path.basename(arguments[-1])}: status {status}"
