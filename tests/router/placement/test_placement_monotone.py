"""More load never attracts: on fleets whose workers are nearly alike, where a little decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.router.placement.policy import place
from services.router.placement.pricing import price_prefill
from services.router.placement.types import DecodeWorker, PlacementFleet, PlacementRequest, PrefillWorker

few = st.integers(0, 4_000)


@st.composite
def prefill_workers(draw: st.DrawFn, i: int) -> PrefillWorker:
    queue = tuple(draw(st.lists(st.integers(1, 6_000), max_size=3)))
    unknown = draw(st.integers(0, 2))
    return PrefillWorker(
        f"p{i}",
        queued_tokens=sum(queue) + (draw(few) if unknown else 0),
        queued_requests=len(queue) + unknown,
        queue=queue,
    )


@st.composite
def decode_workers(draw: st.DrawFn, i: int) -> DecodeWorker:
    return DecodeWorker(
        f"d{i}",
        context_tokens=draw(few),
        sequences=draw(st.integers(0, 6)),
        free_blocks=draw(st.sampled_from([None, 40, 400])),
        max_sequences=draw(st.sampled_from([0, 5])),
    )


@st.composite
def fleets(draw: st.DrawFn) -> PlacementFleet:
    n = draw(st.integers(2, 4))
    return PlacementFleet(
        tuple(draw(prefill_workers(i)) for i in range(n)), tuple(draw(decode_workers(i)) for i in range(n))
    )


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    prompt = draw(st.integers(10, 8_000))
    held = st.dictionaries(st.sampled_from(["p0", "p1"]), st.integers(0, prompt), max_size=1)
    return PlacementRequest(prompt, draw(st.integers(0, 99)), prefill_expected_tokens=draw(held))


@given(requests(), fleets(), st.data())
def test_a_prefill_worker_with_more_to_do_is_not_chosen_for_it(
    request: PlacementRequest, fleet: PlacementFleet, data: st.DataObject
) -> None:
    before = place(request, fleet)
    others = [worker for worker in fleet.prefill if worker.instance != before.prefill]
    worker = data.draw(st.sampled_from(others))
    more = data.draw(st.integers(1, 8_000))
    one_known = replace(
        worker,
        queued_tokens=worker.queued_tokens + more,
        queued_requests=worker.queued_requests + 1,
        queue=(*worker.queue, more),
    )
    one_unknown = replace(
        worker, queued_tokens=worker.queued_tokens + more, queued_requests=worker.queued_requests + 1
    )
    longer = replace(worker, queued_tokens=worker.queued_tokens + more)
    ahead = [tokens for tokens in worker.queue if tokens + more <= request.prompt_tokens]
    grown = [one_known, one_unknown, longer]
    if ahead and not request.prefill_expected_tokens:  # it goes before the new one, whatever is more of it
        queue = tuple(tokens + more if tokens == ahead[0] else tokens for tokens in worker.queue)
        added = sum(queue) - sum(worker.queue)
        grown.append(replace(worker, queue=queue, queued_tokens=worker.queued_tokens + added))
    for busier in grown:
        busy = replace(fleet, prefill=tuple(busier if w is worker else w for w in fleet.prefill))
        assert place(request, busy).prefill != worker.instance


@given(st.integers(1, 4_000), st.integers(1, 12), st.integers(-2_000, 2_000), st.integers(1, 8_000))
def test_one_more_of_other_routers_never_makes_a_worker_cheaper(
    prompt: int, queued_requests: int, beyond: int, more: int
) -> None:
    """They need about as much as the new one; one more may bring down what each of them is taken to need."""
    worker = PrefillWorker(
        "p0", queued_tokens=max(0, prompt * queued_requests + beyond), queued_requests=queued_requests
    )
    busier = replace(worker, queued_tokens=worker.queued_tokens + more, queued_requests=queued_requests + 1)
    fuller = replace(worker, queued_tokens=worker.queued_tokens + more)
    before, *after = price_prefill(PlacementRequest(prompt), (worker, busier, fuller), {})
    for candidate in after:
        assert candidate.total_ms >= before.total_ms * (1 - 1e-9)


@given(requests(), fleets(), st.data())
def test_a_decode_worker_with_more_to_do_is_not_chosen_for_it(
    request: PlacementRequest, fleet: PlacementFleet, data: st.DataObject
) -> None:
    before = place(request, fleet)
    worker = data.draw(st.sampled_from([w for w in fleet.decode if w.instance != before.decode]))
    more = data.draw(st.integers(1, 8_000))
    fuller = replace(worker, sequences=worker.sequences + 1)
    if worker.free_blocks is None:
        fuller = replace(fuller, context_tokens=worker.context_tokens + more)
    busy = replace(fleet, decode=tuple(fuller if w is worker else w for w in fleet.decode))
    assert place(request, busy).decode != worker.instance
