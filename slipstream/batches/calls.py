"""The calls of BatchService for batches, blocking and awaited.

with Client("127.0.0.1:7000") as client:
    file = client.files.upload("requests.jsonl")
    batch = client.batches.wait(client.batches.create(file.id).id)
    for answer in client.batches.answers(batch):
        print(answer.custom_id, answer.body)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing

import grpc

from slipstream.batches.file_calls import AsyncFiles, BlockingFiles
from slipstream.batches.messages import AnswerLines, BatchAnswer, SubmittedBatch, submitted_batch
from slipstream.calls.callers import AsyncCaller, BlockingCaller, Metadata
from slipstream.calls.durations import milliseconds
from slipstream.calls.losses import CALL_S
from slipstream.endpoints import Endpoints
from slipstream.errors import DeadlineExceeded, FailedPrecondition
from slipstream.jobs.messages import CHAT_PATH
from slipstream.v1 import batches_pb2, batches_pb2_grpc

_PAGE = 100
# The pauses between two looks at a batch, and the shortest time-out of a look.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 0.1, 5.0, 1.0


class Polls:
    """The looks at a batch until its end, after pauses that grow up to a bound."""

    def __init__(self, batch_id: str, timeout_s: float | None) -> None:
        """`timeout_s` None: without end."""
        self.request = batches_pb2.GetBatchRequest(batch_id=batch_id)
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def timeout_s(self) -> float:
        """The time-out of the next look."""
        if self._until_s is None:
            return CALL_S
        return min(max(self._until_s - time.monotonic(), _LOOK_S), CALL_S)

    def pause_s(self, batch: SubmittedBatch) -> float:
        """The pause after a look at a batch that goes on. Raises DeadlineExceeded when time is up."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
        if self._until_s is None:
            return pause_s
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"{batch.id} is {batch.state} after {self._timeout_s:g} s")
        return min(pause_s, left_s)


class BlockingBatches:
    """The batches of the caller's tenant; `Client.batches`."""

    def __init__(self, endpoints: Endpoints[grpc.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = BlockingCaller(batches_pb2_grpc.BatchServiceStub, endpoints, metadata, max_retries)
        self._files = BlockingFiles(endpoints, metadata, max_retries)

    def create(
        self,
        file_id: str,
        *,
        endpoint: str = CHAT_PATH,
        metadata: Mapping[str, str] | None = None,
        output_ttl_s: float = 0.0,
    ) -> SubmittedBatch:
        """Make a batch of the requests in a file, which all call `endpoint`.

        `output_ttl_s`: the life of the files of its answers; 0 = 30 days.
        """
        request = _create_request(file_id, endpoint, metadata or {}, output_ttl_s)
        return submitted_batch(self._caller.call("CreateBatch", request, is_idempotent=False).batch)

    def get(self, batch_id: str) -> SubmittedBatch:
        """One batch. Raises NotFound."""
        request = batches_pb2.GetBatchRequest(batch_id=batch_id)
        return submitted_batch(self._caller.call("GetBatch", request).batch)

    def list_batches(self) -> Iterator[SubmittedBatch]:
        """The batches page by page, the newest first."""
        for batch in self._caller.items(
            "ListBatches", batches_pb2.ListBatchesRequest(limit=_PAGE), "batches"
        ):
            yield submitted_batch(batch)

    def cancel(self, batch_id: str) -> SubmittedBatch:
        """End a batch: what is done stays. Raises FailedPrecondition for one that is over."""
        request = batches_pb2.CancelBatchRequest(batch_id=batch_id)
        return submitted_batch(self._caller.call("CancelBatch", request).batch)

    def wait(self, batch_id: str, *, timeout_s: float | None = None) -> SubmittedBatch:
        """The batch when it has ended. Raises DeadlineExceeded after `timeout_s`; the batch goes on."""
        polls = Polls(batch_id, timeout_s)
        while True:
            answer = self._caller.call("GetBatch", polls.request, timeout_s=polls.timeout_s)
            if (batch := submitted_batch(answer.batch)).ended:
                return batch
            time.sleep(polls.pause_s(batch))

    def answers(self, batch: SubmittedBatch | str) -> Iterator[BatchAnswer]:
        """The answers of a batch that has ended; `custom_id` names the request of each.

        They have no particular order. Raises FailedPrecondition before the end.
        """
        return self._lines(self._ended(batch).output_file_id)

    def failures(self, batch: SubmittedBatch | str) -> Iterator[BatchAnswer]:
        """Read like `answers`, the requests that failed or did not run."""
        return self._lines(self._ended(batch).error_file_id)

    def _ended(self, batch: SubmittedBatch | str) -> SubmittedBatch:
        if isinstance(batch, str) or not batch.ended:
            batch = self.get(batch if isinstance(batch, str) else batch.id)
        return checked_end(batch)

    def _lines(self, file_id: str) -> Iterator[BatchAnswer]:
        if file_id:
            lines = AnswerLines()
            with closing(self._files.content(file_id)) as pieces:
                for piece in pieces:
                    yield from lines.add(piece)
            yield from lines.end()


class AsyncBatches:
    """`BlockingBatches` for one event loop; `AsyncClient.batches`."""

    def __init__(self, endpoints: Endpoints[grpc.aio.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = AsyncCaller(batches_pb2_grpc.BatchServiceStub, endpoints, metadata, max_retries)
        self._files = AsyncFiles(endpoints, metadata, max_retries)

    async def create(
        self,
        file_id: str,
        *,
        endpoint: str = CHAT_PATH,
        metadata: Mapping[str, str] | None = None,
        output_ttl_s: float = 0.0,
    ) -> SubmittedBatch:
        """See `BlockingBatches.create`."""
        request = _create_request(file_id, endpoint, metadata or {}, output_ttl_s)
        answer = await self._caller.call("CreateBatch", request, is_idempotent=False)
        return submitted_batch(answer.batch)

    async def get(self, batch_id: str) -> SubmittedBatch:
        """See `BlockingBatches.get`."""
        request = batches_pb2.GetBatchRequest(batch_id=batch_id)
        return submitted_batch((await self._caller.call("GetBatch", request)).batch)

    async def list_batches(self) -> AsyncIterator[SubmittedBatch]:
        """See `BlockingBatches.list_batches`."""
        request = batches_pb2.ListBatchesRequest(limit=_PAGE)
        async for batch in self._caller.items("ListBatches", request, "batches"):
            yield submitted_batch(batch)

    async def cancel(self, batch_id: str) -> SubmittedBatch:
        """See `BlockingBatches.cancel`."""
        request = batches_pb2.CancelBatchRequest(batch_id=batch_id)
        return submitted_batch((await self._caller.call("CancelBatch", request)).batch)

    async def wait(self, batch_id: str, *, timeout_s: float | None = None) -> SubmittedBatch:
        """See `BlockingBatches.wait`."""
        polls = Polls(batch_id, timeout_s)
        while True:
            answer = await self._caller.call("GetBatch", polls.request, timeout_s=polls.timeout_s)
            if (batch := submitted_batch(answer.batch)).ended:
                return batch
            await asyncio.sleep(polls.pause_s(batch))

    async def answers(self, batch: SubmittedBatch | str) -> AsyncIterator[BatchAnswer]:
        """See `BlockingBatches.answers`."""
        async for answer in self._lines((await self._ended(batch)).output_file_id):
            yield answer

    async def failures(self, batch: SubmittedBatch | str) -> AsyncIterator[BatchAnswer]:
        """See `BlockingBatches.failures`."""
        async for answer in self._lines((await self._ended(batch)).error_file_id):
            yield answer

    async def _ended(self, batch: SubmittedBatch | str) -> SubmittedBatch:
        if isinstance(batch, str) or not batch.ended:
            batch = await self.get(batch if isinstance(batch, str) else batch.id)
        return checked_end(batch)

    async def _lines(self, file_id: str) -> AsyncIterator[BatchAnswer]:
        if file_id:
            lines = AnswerLines()
            async with aclosing(self._files.content(file_id)) as pieces:
                async for piece in pieces:
                    for answer in lines.add(piece):
                        yield answer
            for answer in lines.end():
                yield answer


def checked_end(batch: SubmittedBatch) -> SubmittedBatch:
    """The batch. Raises FailedPrecondition for one that goes on, which has no answers yet."""
    if not batch.ended:
        raise FailedPrecondition(f"{batch.id} is {batch.state}: its answers come at its end")
    return batch


def _create_request(
    file_id: str, endpoint: str, metadata: Mapping[str, str], output_ttl_s: float
) -> batches_pb2.CreateBatchRequest:
    return batches_pb2.CreateBatchRequest(
        input_file_id=file_id,
        endpoint=endpoint,
        metadata=metadata,
        output_ttl_ms=milliseconds("output_ttl_s", output_ttl_s),
    )
