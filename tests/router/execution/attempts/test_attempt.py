"""One attempt with a broken connection, a silent worker and a draining worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from libs.common.block_hash import as_tokens
from libs.common.rpc.multiplexed_client import PeerUnanswering
from services.router.execution.attempt_types import AttemptSpec, TokenBatch, WorkerFailed, WorkerPair
from services.router.execution.attempts.attempt import WorkerAttempt
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2


class Listener:
    """Records an attempt's reports. The sequence may leave a draining worker if `leaves` is set."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.failures: list[WorkerFailed] = []
        self.leaves = self.is_closing = False

    def on_batch(self, attempt: WorkerAttempt, batch: TokenBatch) -> None:
        self.tokens += batch.tokens
        self.is_closing |= batch.is_closing

    def on_prompt_logprobs(self, attempt: WorkerAttempt, pieces: Any) -> None:
        raise AssertionError("no prompt asks for its log probabilities")

    def on_attempt_failed(self, attempt: WorkerAttempt, failure: WorkerFailed) -> None:
        self.failures.append(failure)

    def on_listener_error(self, error: Exception) -> None:
        raise error

    def may_leave(self, link: Any) -> bool:
        return self.leaves


class Sequence:
    """A sequence or a prompt on a prefill worker, driven by the test."""

    running, finished = True, False

    def __init__(self) -> None:
        self.is_paused = True
        self.is_closed = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        """The worker's answer never comes."""

    forget = close


def link(*, ready: bool = True, draining: bool = False, is_silent: bool = False) -> Any:
    made = SimpleNamespace(
        key="decode/decode-0/1",
        worker=SimpleNamespace(instance="decode-0"),
        ready=ready,
        draining=draining,
        is_silent=is_silent,
        reachable=not is_silent,
        tokens_in_flight=0,
        releases_in_flight=0,
        listeners=set(),
        count=lambda count: None,
        discount=lambda count: None,
    )

    def add_tokens(tokens: int) -> None:
        made.tokens_in_flight += tokens

    made.add_tokens = add_tokens
    return made


class AttemptRig:
    """An attempt on connections of the test, with or without a prefill worker."""

    def __init__(self, decode: Any, prefill: Any = None) -> None:
        self.listener, self.sequence, self.decode = Listener(), Sequence(), decode
        self.prefill, self.started = Sequence(), list[Any]()
        self.prompts: list[prefill_pb2.StartPrefill] = []

        def start_prefill(start: prefill_pb2.StartPrefill, prompt: Any, listener: Any) -> Sequence:
            self.prompts.append(start)
            return self.prefill

        async def abort_and_wait(attempt: Any, *, timeout_s: float) -> None: ...

        if prefill is not None:
            prefill.key = "prefill/prefill-0/1"
            prefill.prefills = SimpleNamespace(start=start_prefill, abort_and_wait=abort_and_wait)

        def start(request: Any, prompt: Any, listener: Any) -> Sequence:
            self.started.append(request)
            return self.sequence

        stream: Any = SimpleNamespace(start=start, abort_and_wait=abort_and_wait)
        spec = AttemptSpec(
            request_id="r",
            epoch=1,
            fingerprint=common_pb2.Fingerprint(),
            prompt=OutgoingPrompt(as_tokens([1, 2, 3]), [], root=bytes(16), salt=b"", block_tokens=16),
            sampling=common_pb2.SamplingParams(max_tokens=9),
            store_generated=False,
            deadline_s=None,
        )
        workers = WorkerPair(prefill, decode, stream, kvstore_endpoint="")
        self.attempt = WorkerAttempt(1, spec, workers, (), self.listener, asyncio.get_running_loop().time)
        self.attempt.begin()

    def open(self) -> None:
        opened = prefill_pb2.HandoffOpened(ticket=b"t")
        self.attempt.on_prefill_event(prefill_pb2.PrefillEvent(opened=opened))

    def first_token(self, *, is_closing: bool = False) -> None:
        first = prefill_pb2.FirstToken(token_id=5, is_closing=is_closing)
        self.attempt.on_prefill_event(prefill_pb2.PrefillEvent(first_token=first))


@pytest.mark.parametrize(
    ("state", "is_crash"),
    [
        ({"ready": True}, True),
        ({"ready": True, "draining": True}, False),
        ({"ready": False}, False),
        ({"ready": True, "is_silent": True}, False),
    ],
)
async def test_a_crash_counts_even_if_reported_before_the_last_tokens(
    state: dict[str, Any], is_crash: bool
) -> None:
    run = AttemptRig(link(**state))
    run.decode.ready = False
    for _ in range(2):
        run.attempt.on_tokens([7], None)
    run.attempt.on_sequence_failed(errors.Unavailable("Stream removed"))
    assert run.listener.tokens == [7, 7]
    (failure,) = run.listener.failures
    assert failure.is_crash is is_crash


@pytest.mark.parametrize(("error", "is_crash"), [(errors.Unavailable, True), (PeerUnanswering, False)])
async def test_a_worker_that_stands_still_has_not_crashed_though_its_silence_is_not_seen_yet(
    error: type[errors.SlipstreamError], is_crash: bool
) -> None:
    decoding, prefilling = AttemptRig(link()), AttemptRig(link(), link())
    decoding.attempt.on_sequence_failed(error("the connection is lost"))
    prefilling.attempt.on_prefill_failed(error("the connection is lost"), is_connection_lost=True)
    failures = [*decoding.listener.failures, *prefilling.listener.failures]
    assert [failure.is_crash for failure in failures] == [is_crash] * 2


async def test_a_prompt_names_the_decode_worker_that_reads_its_handoff() -> None:
    decode, prefill = link(), link()
    decode.worker.instance, prefill.worker.instance = "decode-7", "prefill-0"
    [start] = AttemptRig(decode, prefill).prompts
    assert start.decode_instance == "decode-7"


async def test_tokens_are_counted_and_the_sequence_leaves_a_draining_worker() -> None:
    run = AttemptRig(link())
    before = run.decode.tokens_in_flight
    run.attempt.on_tokens([8, 9], None)
    assert run.decode.tokens_in_flight == before + 2
    run.decode.draining = True
    run.attempt.on_tokens([10], None)  # the listener does not allow leaving yet
    assert not run.listener.failures
    run.listener.leaves = True
    run.attempt.pause()
    run.attempt.on_worker_draining(run.decode)  # the client does not read
    assert not run.listener.failures
    run.attempt.resume()
    run.attempt.on_worker_draining(run.decode)
    (failure,) = run.listener.failures
    assert failure.is_drain and not failure.is_crash
    run.attempt.on_tokens([11], None)
    assert run.listener.tokens == [8, 9, 10]
    release = run.attempt.release()
    assert release is not None
    await release
    assert (run.decode.tokens_in_flight, run.decode.listeners) == (0, set())


async def test_decode_tokens_are_read_after_the_first_token_and_not_during_a_pause() -> None:
    run = AttemptRig(link(), link())
    run.open()
    assert len(run.started) == 1  # the sequence starts while prefill computes
    assert run.sequence.is_paused
    run.attempt.pause()
    run.first_token()
    assert run.listener.tokens == [5]
    assert run.sequence.is_paused
    run.attempt.resume()
    assert not run.sequence.is_paused


async def test_a_token_that_the_limit_has_changed_is_reported_by_both_workers() -> None:
    run = AttemptRig(link(), link())
    run.open()
    run.first_token(is_closing=True)
    assert run.listener.is_closing
    run = AttemptRig(link())
    run.attempt.on_tokens([8], None)
    assert not run.listener.is_closing
    run.attempt.on_tokens([9], decode_pb2.SequenceDelta(is_closing=True))
    assert run.listener.is_closing


async def test_a_first_token_without_a_handoff_fails_the_attempt() -> None:
    run = AttemptRig(link(), link())
    run.first_token()
    (failure,) = run.listener.failures
    assert (failure.worker, run.listener.tokens, run.started) == ("prefill/prefill-0/1", [], [])


@pytest.mark.parametrize(
    ("silent", "when", "fails"),
    [
        ("prefill", "computing", True),
        ("prefill", "pulling", True),
        ("prefill", "running", False),
        ("decode", "computing", False),
        ("decode", "running", True),
    ],
)
async def test_a_silent_worker_fails_the_attempts_that_need_it(silent: str, when: str, fails: bool) -> None:
    run = AttemptRig(link(), link())
    links = {"prefill": run.attempt.workers.prefill, "decode": run.decode}
    run.open()
    run.sequence.running = when == "running"
    if when != "computing":
        run.first_token()
    run.attempt.on_worker_silent(links[silent])
    assert [failure.worker for failure in run.listener.failures] == [links[silent].key] * fails
    assert not any(failure.is_crash for failure in run.listener.failures)


async def test_a_stopped_sequence_gives_its_statistics() -> None:
    run = AttemptRig(link())
    aborted: list[bool] = []
    run.sequence.abort = lambda: aborted.append(True)  # type: ignore[method-assign]
    stopping = asyncio.create_task(run.attempt.stop())
    await asyncio.sleep(0)
    assert aborted == [True]
    run.attempt.on_tokens([9], None)  # too late
    stats = decode_pb2.SequenceStats(generated_tokens=4)
    last = decode_pb2.SequenceDelta(finish_reason=common_pb2.FINISH_REASON_ABORTED, stats=stats)
    run.attempt.on_tokens([], last)
    assert await stopping == stats
    assert (run.listener.tokens, run.listener.failures) == ([], [])
