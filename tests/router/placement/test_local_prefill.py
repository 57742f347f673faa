"""The choice of the worker that computes a prompt: a prefill worker, or the decode worker itself."""

from __future__ import annotations

from msgspec.structs import replace

from services.router.placement.policy import place
from services.router.placement.types import DecodeWorker, PlacementFleet, PlacementRequest, PrefillWorker


def test_a_short_prompt_is_computed_on_decode_when_prefill_is_far_behind() -> None:
    busy = PlacementFleet(
        (PrefillWorker("p0", queued_tokens=50_000),), (DecodeWorker("d0"), DecodeWorker("d1", sequences=9))
    )
    turn = PlacementRequest(
        8_000, 0, decode_expected_tokens={"d0": 7_900, "d1": 7_900}, may_skip_prefill=True
    )
    decision = place(turn, busy)
    assert (decision.prefill, decision.decode, decision.uncached_tokens) == ("", "d0", 100)
    assert "prefill wait is 25000.0 ms longer on p0 with d0" in decision.reason
    assert place(replace(turn, may_skip_prefill=False), busy).prefill == "p0"


def _behind(queued_tokens: int, *decode: DecodeWorker) -> PlacementFleet:
    return PlacementFleet((PrefillWorker("p0", queued_tokens=queued_tokens),), decode)


def test_a_long_prompt_is_computed_on_an_idle_decode_worker_behind_a_long_queue_only() -> None:
    request = PlacementRequest(8_000, may_skip_prefill=True)
    decision = place(request, _behind(50_000, DecodeWorker("d0")))
    assert (decision.prefill, decision.decode, decision.uncached_tokens) == ("", "d0", 8_000)
    assert place(request, _behind(0, DecodeWorker("d0"))).prefill == "p0"
    # The wait of 25 s is less than what a prompt of 4.6 s costs eight streams, unless they wait for prefill.
    assert place(request, _behind(50_000, DecodeWorker("d0", sequences=8))).prefill == "p0"
    waiting = DecodeWorker("d0", sequences=8, context_tokens=80_000, decoding_tokens=9_000)
    assert waiting.decoding == 1
    assert place(request, _behind(50_000, waiting)).prefill == ""
    assert place(request, _behind(50_000, DecodeWorker("d0", sequences=8), DecodeWorker("d1"))).decode == "d1"


def test_prompts_that_wait_on_a_decode_worker_make_it_dearer() -> None:
    fleet = _behind(50_000, DecodeWorker("d0", queued_tokens=100), DecodeWorker("d1"))
    for request in (PlacementRequest(8_000), PlacementRequest(8_000, may_skip_prefill=True)):
        assert place(request, fleet).decode == "d1"
    # The sequence of a pair waits for what is left of them when its own prompt is computed.
    queued = [
        place(PlacementRequest(8_000), _behind(0, DecodeWorker("d0", queued_tokens=tokens))).cost
        for tokens in (9, 20_000)
    ]
    assert [cost.queue_ms for cost in queued] == [0.0, 20_000 * 0.5 - queued[1].prefill_ms]
