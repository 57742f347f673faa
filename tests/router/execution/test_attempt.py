"""What one attempt makes of a connection that breaks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from libs.common.block_hash import as_tokens
from services.router.execution.attempt import Attempt
from services.router.execution.attempt_types import AttemptSpec, WorkerFailed, WorkerPair
from services.router.workers.decode_sequence import Arrival
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.v1 import common_pb2


class Sequence:
    """Some tokens come, and then the connection is gone; the link hears of that at once."""

    running = True

    def __init__(self, link: Any) -> None:
        self._link, self._frames = link, 2

    async def next_or_idle(self) -> Arrival:
        self._link.ready = False
        if not self._frames:
            raise errors.Unavailable("Stream removed")
        self._frames -= 1
        return Arrival([7], None)


def link(*, ready: bool, draining: bool = False, report_age_s: float = 0.1) -> Any:
    return SimpleNamespace(
        key="decode/decode-0/1",
        ready=ready,
        draining=draining,
        report_age_s=report_age_s,
        tokens_in_flight=0,
        count=lambda count: None,
    )


def attempt_at(decode: Any, sequence: Any) -> Attempt:
    stream: Any = SimpleNamespace(start=lambda request, prompt: sequence)
    job = AttemptSpec(
        request_id="r",
        epoch=1,
        fingerprint=common_pb2.Fingerprint(),
        prompt=OutgoingPrompt(as_tokens([1, 2, 3]), [], root=bytes(16), salt=b"", block_tokens=16),
        sampling=common_pb2.SamplingParams(max_tokens=9),
        store_generated=False,
        deadline_s=None,
    )
    place = WorkerPair(None, decode, stream, kvstore_endpoint="")
    return Attempt(1, job, place, (), asyncio.get_running_loop().time)


@pytest.mark.parametrize(
    ("state", "died"),
    [
        ({"ready": True}, True),
        ({"ready": True, "draining": True}, False),
        ({"ready": False}, False),
        ({"ready": True, "report_age_s": 9.0}, False),
    ],
)
async def test_a_death_counts_also_when_it_is_known_before_the_last_tokens_are_taken(
    state: dict[str, Any], died: bool
) -> None:
    decode = link(**state)
    batches = attempt_at(decode, Sequence(decode)).batches()
    assert [(await anext(batches)).tokens for _ in range(2)] == [[7], [7]]
    with pytest.raises(WorkerFailed) as failed:
        await anext(batches)
    assert failed.value.died is died


async def test_tokens_between_batches_are_counted_and_left_when_the_worker_drains() -> None:
    decode = link(ready=True)
    sequence: Any = Sequence(decode)
    attempt = attempt_at(decode, sequence)
    batches = attempt.batches()
    await anext(batches)
    in_flight = decode.tokens_in_flight
    assert not sequence.on_tokens([8])  # nobody takes any yet
    taken: list[int] = []

    def take(tokens: list[int]) -> bool:
        taken.extend(tokens)
        return len(taken) < 3

    attempt.take_tokens = take  # type: ignore[assignment]
    assert sequence.on_tokens([8, 9])
    assert decode.tokens_in_flight == in_flight + 2
    assert not sequence.on_tokens([10])
    decode.draining = True
    assert not sequence.on_tokens([11])
    assert (taken, decode.tokens_in_flight) == ([8, 9, 10], in_flight + 2)
    await batches.aclose()
