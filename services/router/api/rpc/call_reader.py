"""Reads the messages of Generate and Tokenize, and looks up the stored response that a call goes on with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.rpc.history import AnswerKeeper, continue_call
from services.router.api.rpc.generate_message import ParsedCall, parse_call, parse_tokenized
from services.router.api.rpc.wire.message_structure import is_mostly_prose
from services.router.execution.request_manager import INLINE_BYTES, RequestManager
from services.router.request.types import Caller, GenerationRequest
from slipstream import errors
from slipstream.v1 import router_pb2

_GENERATE: Any = router_pb2.GenerateRequest.DESCRIPTOR  # typed as two classes, one for each implementation


class ReadCall(NamedTuple):
    """A call. `n_bytes`: the most that is read for it; 0: little. `keeper`: stores its answer, if any."""

    parsed: ParsedCall
    n_bytes: int
    keeper: AnswerKeeper | None = None


class CallReader:
    """Reads calls, long ones off the event loop."""

    def __init__(self, manager: RequestManager, responses: ResponseOperations) -> None:
        self._manager = manager
        self._responses = responses

    async def generation(self, data: bytes, caller: Caller, *, request_id: str) -> ReadCall:
        """A call of Generate. Raises InvalidArgument, NotFound, Overloaded and DeadlineExceeded.

        `request_id` is the metadata's; the message's own comes first.
        """
        # On the event loop a long prompt takes 0.1 ms, or 0.5 ms of other letters than ASCII's. A thread adds
        # 0.3 ms of CPU.
        is_quick = len(data) > INLINE_BYTES and is_mostly_prose(data, _GENERATE)
        try:
            parse = partial(parse_call, data, request_id)
            return await self._read(caller, parse, n_bytes=0 if is_quick else len(data))
        except errors.InvalidArgument:
            self._manager.context.counters.add("slipstream_requests_refused_total")
            raise

    async def tokenized(self, data: bytes, caller: Caller) -> tuple[GenerationRequest, int]:
        """The request of a call of Tokenize, and the most that is read for it. Raises as `generation`."""
        read = await self._read(caller, partial(parse_tokenized, data), n_bytes=len(data))
        return read.parsed.requests[0], read.n_bytes

    async def _read(self, caller: Caller, parse: Callable[[], ParsedCall], *, n_bytes: int) -> ReadCall:
        parsed = await self._manager.read(caller, parse, n_bytes=n_bytes)
        if parsed.draft is None:
            return ReadCall(parsed, n_bytes)
        found = await continue_call(
            self._manager, self._responses, parsed.requests, parsed.draft, caller, n_bytes=n_bytes
        )
        parsed = msgspec.structs.replace(parsed, requests=found.requests)
        return ReadCall(parsed, n_bytes + found.n_further_bytes, found.keeper)
