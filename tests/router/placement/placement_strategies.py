"""Strategies for the inputs of placement: workers, stores and requests of any load and any held prefix."""

from __future__ import annotations

from hypothesis import strategies as st

from services.router.placement.cost_model import DecodeModel, PrefillModel
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)

# Strategies are made once: hypothesis checks each new one, which takes longer than to draw from it.
counts = st.integers(0, 200_000)
groups = st.sampled_from([("socket", ""), ("mooncake", ""), ("socket", "far")])
refusals = st.sampled_from(["", "", "", "does not answer"])
models = st.sampled_from(["A", "A", "A", "B"])
n_queued = st.integers(0, 20)
queues = st.lists(st.integers(0, 50_000), max_size=3)
turns = st.integers(0, 5)
token_times_ms = st.sampled_from([0.05, 0.5, 5.0])
n_sequences = st.integers(0, 80)
n_queued_tokens = st.integers(0, 2000)
n_free_blocks = st.none() | st.integers(0, 10_000)
sequence_limits = st.sampled_from([0, 64])
block_sizes_bytes = st.sampled_from([0, 1 << 16])
step_times_ms = st.sampled_from([5.0, 50.0])
fleet_sizes = st.integers(0, 6)
n_stores = st.integers(0, 3)
region_times_ms = st.sampled_from([0.0, 80.0])
MAX_PROMPT = 100_000
prompt_sizes = st.integers(1, MAX_PROMPT)
n_held = st.integers(0, MAX_PROMPT)  # what is beyond the prompt stands for all of it
held_by_prefill = st.dictionaries(st.sampled_from(["p0", "p1", "p2", "gone"]), n_held)
held_by_decode = st.dictionaries(st.sampled_from(["d0", "d1", "gone"]), n_held)
held_by_store = st.dictionaries(st.sampled_from(["k0", "k1", "gone"]), st.tuples(n_held, n_held))
seeds = st.integers(0, 1 << 64)
output_sizes = st.integers(1, 2000)
content_keys = st.binary(max_size=4)


@st.composite
def prefill_workers(draw: st.DrawFn, i: int) -> PrefillWorker:
    transport, region = draw(groups)
    return PrefillWorker(
        f"p{i}",
        fingerprint=draw(models),
        transport=transport,
        region=region,
        refused=draw(refusals),
        queued_tokens=draw(counts),
        queued_requests=draw(n_queued),
        queue=tuple(draw(queues)),
        last_cold=draw(turns),
        model=PrefillModel(token_ms=draw(token_times_ms)),
    )


@st.composite
def decode_workers(draw: st.DrawFn, i: int) -> DecodeWorker:
    transport, region = draw(groups)
    return DecodeWorker(
        f"d{i}",
        fingerprint=draw(models),
        transport=transport,
        region=region,
        refused=draw(refusals),
        context_tokens=draw(counts),
        sequences=draw(n_sequences),
        queued_tokens=draw(n_queued_tokens),
        free_blocks=draw(n_free_blocks),
        max_sequences=draw(sequence_limits),
        block_bytes=draw(block_sizes_bytes),
        model=DecodeModel(step_base_ms=draw(step_times_ms)),
    )


PREFILL_WORKERS = [prefill_workers(i) for i in range(6)]
DECODE_WORKERS = [decode_workers(i) for i in range(6)]


@st.composite
def fleets(draw: st.DrawFn) -> PlacementFleet:
    stores = []
    for i in range(draw(n_stores)):
        transport, region = draw(groups)
        stores.append(KvStore(f"k{i}", transport, region, draw(refusals)))
    return PlacementFleet(
        prefill=tuple(draw(PREFILL_WORKERS[i]) for i in range(draw(fleet_sizes))),
        decode=tuple(draw(DECODE_WORKERS[i]) for i in range(draw(fleet_sizes))),
        stores=tuple(stores),
        region_ms={"far": draw(region_times_ms)},
    )


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    prompt = draw(prompt_sizes)

    def held(by_worker: st.SearchStrategy[dict[str, int]]) -> dict[str, int]:
        return {name: min(tokens, prompt) for name, tokens in draw(by_worker).items()}

    stores = draw(held_by_store)
    return PlacementRequest(
        prompt_tokens=prompt,
        seed=draw(seeds),
        fingerprint="A",
        output_tokens=draw(output_sizes),
        prefill_expected_tokens=held(held_by_prefill),
        prefill_confirmed_tokens=held(held_by_prefill),
        prefill_lendable_tokens=held(held_by_prefill),
        decode_expected_tokens=held(held_by_decode),
        store_held={
            name: HeldTokens(min(max(a, b), prompt), min(a, b, prompt)) for name, (a, b) in stores.items()
        },
        content_key=draw(content_keys),
        may_skip_prefill=draw(st.booleans()),
    )
