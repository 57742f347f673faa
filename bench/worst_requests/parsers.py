"""The functions of the router that parse the worst requests, by the path or the method of these. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from bench.worst_requests import bodies, messages
from services.router.api.anthropic.request import parse_messages_body
from services.router.api.openai.request import parse_chat, parse_completion
from services.router.api.openai.token_bodies import parse_detokenize
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.api.rpc.generate_message import parse_call
from services.router.api.rpc.wire.message_reader import read_message
from services.router.api.workers_ai.run_body import BatchBody, RunBody, parse_run
from services.router.request.token_ids import listed
from services.router.request.types import GenerationRequest
from slipstream.v1 import jobs_pb2, router_pb2

# None: what the message asks for is no generation, or begins later.
Parser: TypeAlias = Callable[[bytes], GenerationRequest | None]


def _run(data: bytes) -> GenerationRequest | None:
    body = parse_run(data, "").body
    if isinstance(body, BatchBody):
        for run in body.runs:
            parse_chat(run.chat, "")
        return None
    assert isinstance(body, RunBody)
    return parse_chat(body.chat, "")[0][0]


def _response(data: bytes) -> GenerationRequest:
    return parse_response(decode_response(data), EarlierItems(), is_stored=False).generation


def _detokenize(data: bytes) -> None:
    parse_detokenize(data)


def _token_ids(data: bytes) -> None:
    listed(read_message(data, router_pb2.DetokenizeRequest).token_ids)


def _jobs(data: bytes) -> None:
    read_message(data, jobs_pb2.SubmitJobsRequest)


PARSERS: Mapping[str, Parser] = {
    "/v1/chat/completions": lambda data: parse_chat(data, "")[0][0],
    "/v1/completions": lambda data: parse_completion(data, "")[0][0],
    bodies.RESPONSES: _response,
    bodies.MESSAGES: lambda data: parse_messages_body(data).generation,
    bodies.RUN: _run,
    bodies.DETOKENIZE: _detokenize,
    messages.GENERATE: lambda data: parse_call(data).requests[0],
    messages.DETOKENIZE: _token_ids,
    messages.SUBMIT_JOBS: _jobs,
}
