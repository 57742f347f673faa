"""The seam between the APIs and what runs requests: a format reads bodies and writes answers."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from libs.common.http.failure import HttpFailure
from libs.database.transaction import SqlTransaction
from services.router.request.types import Caller, GenerationRequest
from slipstream import errors
from slipstream.v1 import router_pb2

Json = dict[str, Any]


class AnswerOptions(msgspec.Struct, frozen=True, gc=False):
    """How the client wants the answer; the options change nothing in what is generated.

    `session` names the request's session where no header does. `ignored` is the text of the answer's header
    that names the fields without effect, `n_ignored` their number.
    """

    stream: bool
    session: str | None = None
    ignored: str = ""
    n_ignored: int = 0


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """A writer's input beside the body. `with_stats`: the client asked for the request's statistics.

    `text_of` decodes the token ids of a prompt, many off the event loop, with control tokens by name.
    """

    request_id: str
    with_stats: bool
    text_of: Callable[[Sequence[int]], Awaitable[str]]


class AnswerWriter(abc.ABC):
    """One answer as it grows. A streamed one is `opening`, each `delta_event`, `before_closing`, `closing`.

    A whole one is each `add`, then `body`.
    """

    @abc.abstractmethod
    def opening(self) -> bytes:
        """The server-sent events before the first piece."""

    @abc.abstractmethod
    def delta_event(self, delta: router_pb2.Delta) -> bytes:
        """The events of one piece."""

    def before_closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """Events of the end before its last ones, in pieces that take a short time to make."""
        return ()

    @abc.abstractmethod
    def closing(self, finished: router_pb2.Finished) -> Iterable[bytes]:
        """The last events of the stream, in such pieces. With the first one, the whole answer is made."""

    @abc.abstractmethod
    def add(self, delta: router_pb2.Delta) -> None:
        """Fold a piece into the whole answer."""

    @abc.abstractmethod
    def body(self, finished: router_pb2.Finished) -> Json:
        """The whole answer, after all pieces were added."""


class ChoicesWriter(abc.ABC):
    """An answer of several choices as they grow. `leaders`: the choices whose usage counts a prompt."""

    @abc.abstractmethod
    def encode(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> bytes:
        """The events of the choice with this index, of a streamed answer."""

    @abc.abstractmethod
    def last_event(self, leaders: frozenset[int]) -> bytes:
        """The end of a streamed answer, after the ends of all choices."""

    @abc.abstractmethod
    def add(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> None:
        """Fold the events of a choice into the whole answer."""

    @abc.abstractmethod
    def body(self, leaders: frozenset[int]) -> Json:
        """The whole answer, after the ends of all choices."""


class ParsedBody(abc.ABC):
    """One body: a request for each choice, at least one, and the writer of their answer."""

    requests: Sequence[GenerationRequest]  # only OpenAI's formats have more than one
    options: AnswerOptions
    is_background = False  # whether the client asks for an answer that it fetches later

    async def before_writer(self, context: AnswerContext, index: int = 0) -> None:
        """Wait for what the writer of the choice with this index needs. The choice's request has started."""
        return

    @abc.abstractmethod
    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> AnswerWriter:
        """The writer of the choice with this index, once its request has started."""

    def choices_writer(self, context: AnswerContext) -> ChoicesWriter:
        """The writer of all choices, where there are several. Raises Internal where the format has one."""
        raise errors.Internal("the format has one choice")

    async def before_end(self) -> None:
        """Wait for what must be true before the client knows the end: that the answer is stored, say.

        The writer has begun `closing` by then, of which nothing is sent.
        """
        return

    def stored_with_end(self) -> Callable[[SqlTransaction], None] | None:
        """The function that stores more than the result in the transaction of a job's end."""
        return None


class AnswerFormat(abc.ABC):
    """One API's form of bodies, answers and errors."""

    n_further_bytes = 0  # that `parse` reads beside the body
    n_read_bytes = 0  # that were read from the database for the body

    async def for_body(self, caller: Caller, data: bytes) -> AnswerFormat:
        """The format for this body, where one needs to look something up before it is parsed.

        Raises the typed errors of slipstream/errors.py.
        """
        return self

    @abc.abstractmethod
    def parse(self, data: bytes, request_id: str) -> ParsedBody:
        """The body. It runs off the event loop where it is long. Raises InvalidArgument naming the field.

        `request_id` is the header's; the body's own comes first.
        """

    @abc.abstractmethod
    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        """The body of an answer that failed before its first byte."""

    @abc.abstractmethod
    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        """The events that end a stream which fails amid its answer, in pieces that take a short time to make.

        `writer`: None before the first event.
        """
