"""The most expensive messages of each kind over gRPC, where they differ from HTTP's. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from slipstream import bounds
from slipstream.v1 import jobs_pb2, router_pb2
from tests.support.fuzz.message_fuzzer import varint

_ROOM = 200
GENERATE = "/slipstream.v1.RouterService/Generate"
DETOKENIZE = "/slipstream.v1.RouterService/Detokenize"
SUBMIT_JOBS = "/slipstream.v1.JobService/SubmitJobs"


class GrpcRequest(NamedTuple):
    """A message and the method that gets it."""

    message: bytes
    method: str = GENERATE


def _generate(make: Callable[[], bytes]) -> GrpcRequest:
    return GrpcRequest(make())


def _repeated(item: bytes, *, around: bytes = b"\x12") -> bytes:
    """A field of the request (2 is `chat`) with this encoded item as often as it fits."""
    inside = item * ((bounds.MAX_BODY_BYTES - _ROOM) // len(item))
    return around + varint(len(inside)) + inside


def _request() -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest()
    request.sampling.max_tokens = 1
    text = router_pb2.ContentPart(text="hi")
    request.chat.messages.add(role=router_pb2.MESSAGE_ROLE_USER, content=[text])
    return request


def _arguments(text: str) -> bytes:
    request = _request()
    call = router_pb2.ToolCall(id="functions.f:0", name="f", arguments=text)
    request.chat.messages.add(role=router_pb2.MESSAGE_ROLE_ASSISTANT, tool_calls=[call])
    return request.SerializeToString()


def _parameters(text: str, count: int) -> bytes:
    request = _request()
    for n in range(count):
        request.chat.tools.add(name=f"f{n}", parameters=text)
    return request.SerializeToString()


def _prompt(text: bytes) -> bytes:
    prompt = text * ((bounds.MAX_BODY_BYTES - _ROOM) // len(text))
    number = router_pb2.GenerateRequest.PROMPT_FIELD_NUMBER
    return bytes([number << 3 | 2]) + varint(len(prompt)) + prompt


def _calling() -> bytes:
    """As many messages of an assistant as are allowed, each with a call, reasoning and content parts."""
    request = router_pb2.GenerateRequest()
    request.sampling.max_tokens = 1
    text = router_pb2.ContentPart(text="a")
    call = router_pb2.ToolCall(id="f:0", name="f", arguments="{}")
    request.chat.messages.extend(
        router_pb2.Message(
            role=router_pb2.MESSAGE_ROLE_ASSISTANT,
            content=[text] * 5,
            reasoning_content="b",
            tool_calls=[call],
        )
        for _ in range(4096)
    )
    return request.SerializeToString()


def _ids(count: int) -> bytes:
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[1] * count))
    request.sampling.max_tokens = 1
    return request.SerializeToString()


def _detokenized(count: int) -> GrpcRequest:
    message = router_pb2.DetokenizeRequest(token_ids=[1] * count)
    return GrpcRequest(message.SerializeToString(), DETOKENIZE)


def _jobs(count: int, body: bytes) -> GrpcRequest:
    jobs = [jobs_pb2.NewJob(path="/v1/chat/completions", body=body)] * count
    return GrpcRequest(jobs_pb2.SubmitJobsRequest(jobs=jobs).SerializeToString(), SUBMIT_JOBS)


def _body(n_bytes: int) -> bytes:
    return b'{"max_tokens":1,"messages":[{"role":"user","content":"' + b"x" * n_bytes + b'"}]}'


_GENERATE_KINDS: dict[str, Callable[[], bytes]] = {
    "4096 tool calls": _calling,
    "empty messages": lambda: _repeated(b"\x0a\x00"),
    "empty content parts": lambda: _repeated(b"\x12\x00", around=b"\x12" + varint(8 << 20) + b"\x0a"),
    "unknown fields": lambda: _repeated(b"\xf8\x07\x01"),
    "parameters, 8 MiB of lists": lambda: _parameters('{"a":[' + "[]," * (8 << 18) + "0]}", 1),
    "parameters, deep": lambda: _parameters('{"a":' * 90_000, 1),
    "parameters, parentheses": lambda: _parameters('{"type":"object","pattern":"' + "(" * 5000 + '"}', 128),
    "arguments, 6 MiB of lists": lambda: _arguments('{"a":[' + "[]," * (8 << 18) + "0]}"),
    "a prompt of rare characters": lambda: _prompt("\U0001f9a9\U00012345".encode()),
    "a prompt without UTF-8": lambda: _prompt(b"\xff"),
}
_TOO_MANY = bounds.MAX_BODY_BYTES - _ROOM  # ids of one byte
_GENERATE_KINDS |= {
    "a prompt of 8 million ids": lambda: _ids(_TOO_MANY),
    "a prompt of as many ids as a message may have": lambda: _ids(bounds.MAX_MESSAGE_NUMBERS),
    "a prompt of 262,000 ids": lambda: _ids(262_000),
}
_OTHER_METHODS: dict[str, Callable[[], GrpcRequest]] = {
    "Detokenize, 8 million ids": lambda: _detokenized(_TOO_MANY),
    "Detokenize, as many ids as a message may have": lambda: _detokenized(bounds.MAX_MESSAGE_NUMBERS),
    "SubmitJobs, 500 of 16 KB": lambda: _jobs(500, _body(16_000)),
    "SubmitJobs, 100,000 empty jobs": lambda: GrpcRequest(b"\x0a\x00" * 100_000, SUBMIT_JOBS),
}
KINDS: dict[str, Callable[[], GrpcRequest]] = {
    **{name: partial(_generate, make) for name, make in _GENERATE_KINDS.items()},
    **_OTHER_METHODS,
}
