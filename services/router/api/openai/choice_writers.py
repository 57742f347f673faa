"""The choices of one answer: the writer of each, and how those that are over ended."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.api.answers.answer_format import AnswerContext, ChoicesWriter, Json, ParsedBody
from services.router.api.answers.logprob_rows import LogprobBudget
from services.router.api.choices import leaders_of, sum_usage
from services.router.api.openai.response import ResponseWriter
from slipstream import bounds
from slipstream.v1 import router_pb2


class ChoiceWriters(ChoicesWriter):
    """All choices have one id and one time."""

    def __init__(self, body: ParsedBody, context: AnswerContext, *, is_chat: bool) -> None:
        """A chat's answer has the rows of its prompt once, one of completions in each choice."""
        self._body = body
        self._is_chat = is_chat
        self._context = context
        self._created_unix_s = 0.0
        self._writers: dict[int, ResponseWriter] = {}
        self._leaders = leaders_of(body.requests)
        self._n_logprobs = 0  # of prompts, in the whole answer
        self._budget = LogprobBudget()
        self._finished: dict[int, router_pb2.Finished] = {}

    def _after_start(
        self, index: int, events: Sequence[router_pb2.GenerateEvent]
    ) -> Sequence[router_pb2.GenerateEvent]:
        """The events without `started`, which makes the choice's writer."""
        if not events[0].HasField("started"):
            return events
        started = events[0].started
        self._created_unix_s = self._created_unix_s or started.created_unix_s
        started.created_unix_s = self._created_unix_s
        started.request_id = self._context.request_id
        writer = self._body.writer(started, self._context, index)
        assert isinstance(writer, ResponseWriter)
        writer.share_budget(self._budget)
        leader = self._leaders[index]
        if leader == index:
            self._check_rows(started, index)
            writer.keeps_prompt = self._leaders.count(index) > 1
        elif self._body.requests[leader].sampling.prompt_logprobs is not None:
            writer.share_prompt(self._writers[leader])
        self._writers[index] = writer
        return events[1:]

    def _check_rows(self, started: router_pb2.Started, index: int) -> None:
        """Raises InvalidArgument where the answer has too many rows of prompts."""
        top = self._body.requests[index].sampling.prompt_logprobs
        if top is not None:
            n_copies = 1 if self._is_chat else self._leaders.count(index)
            self._n_logprobs += n_copies * started.prompt_tokens * (1 + top)
            bounds.PROMPT_ROWS.check(self._n_logprobs)

    def encode(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> bytes:
        is_new = index not in self._writers
        events = self._after_start(index, events)
        writer = self._writers[index]
        data = writer.opening() if is_new else b""
        for event in events:
            if event.HasField("finished"):
                self._finished[index] = event.finished
                data += writer.finish_event(event.finished, with_stats=False)
            else:
                data += writer.delta_event(event.delta)
        return data

    def add(self, index: int, events: Sequence[router_pb2.GenerateEvent]) -> None:
        for event in self._after_start(index, events):
            if event.HasField("finished"):
                self._finished[index] = event.finished
            else:
                self._writers[index].add(event.delta)

    def last_event(self, leaders: frozenset[int]) -> bytes:
        return self._writers[0].answer_end(self._usage(leaders), self._finished[0])

    def body(self, leaders: frozenset[int]) -> Json:
        bodies = [self._writers[index].choice(self._finished[index]) for index in sorted(self._writers)]
        return self._writers[0].body_of(bodies, self._usage(leaders), self._finished[0])

    def _usage(self, leaders: frozenset[int]) -> router_pb2.Usage:
        return sum_usage([self._finished[index].usage for index in sorted(self._finished)], leaders)
