"""The price of each way to run a part of a request. Pure; policy.py compares them.

`place` is to take at most 0.3 ms for 64 + 64 workers (`python -m bench.placement.decision`). For that the
functions here are loops with the sums of `PrefillModel` and `DecodeModel` written out, and make candidates
and costs with positional arguments. A call costs 0.05 us, keywords 0.5 us a candidate.
tests/router/placement/reference.py prices with the methods of the models, to the same last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.router.placement.kv_source import KvSources
from services.router.placement.prefill_queue import queue_delay
from services.router.placement.types import (
    DecodeWorker,
    Group,
    PlacementRequest,
    PrefillWorker,
    WorkerCandidate,
)

# A millisecond of a decode step weighs as much as this many milliseconds before the first token.
STEP_WEIGHT_TOKENS = 16
MIB = 1 << 20
OTHER_MODEL = "runs another model"


def price_prefill(
    request: PlacementRequest, workers: Sequence[PrefillWorker], sources: Mapping[Group, KvSources]
) -> list[WorkerCandidate]:
    """The prompt on each prefill worker, with KV from its own pages and the best source of its group."""
    prompt_tokens, fingerprint = request.prompt_tokens, request.fingerprint
    all_expected, all_confirmed = request.prefill_expected_tokens, request.prefill_confirmed_tokens
    candidates = []
    for worker in workers:
        instance, model, group = worker.instance, worker.model, (worker.transport, worker.region)
        held = all_expected.get(instance, 0)
        if held >= prompt_tokens:
            held = prompt_tokens - 1  # one token at least is computed
        cached = all_confirmed.get(instance, held)
        if cached > held:
            cached = held
        request_ms, token_ms, attention_ms = model.request_ms, model.token_ms, model.attention_ms
        uncached = prompt_tokens - cached
        pairs = uncached * (cached + uncached / 2) * 1e-3
        prefill_ms = request_ms + token_ms * uncached + attention_ms * pairs
        source, loaded, load_ms = None, 0, 0.0
        of_group = sources.get(group) if sources else None
        if of_group is not None:
            # Predicted KV may come late, and computing it again costs far more than a read.
            source, load_ms, prefill_ms = of_group.best_read(cached, prefill_ms, model)
            if source is not None:
                loaded, cached = source.tokens - cached, source.tokens
        if cached < held:
            cached, prefill_ms = held, model.compute_ms(prompt_tokens - held, prompt_tokens)
        uncached = prompt_tokens - cached
        delay = queue_delay(worker, uncached, prompt_tokens)
        ahead_tokens, ahead_requests, longer_tokens, delays, load_tokens = delay
        longer_ms = model.longer_token_ms * longer_tokens
        queue_ms = request_ms * ahead_requests + token_ms * ahead_tokens + longer_ms
        others_ms = (request_ms + token_ms * uncached) * delays
        total_ms = queue_ms + prefill_ms + load_ms + others_ms
        refused = worker.refused or ("" if worker.fingerprint == fingerprint else OTHER_MODEL)
        candidate = WorkerCandidate(
            "prefill", instance, group, refused, total_ms, cached - loaded, load_tokens, others_ms,
            0.0, 0.0, 0.0, uncached, queue_ms, prefill_ms, load_ms,
            ahead_tokens, ahead_requests, longer_tokens, worker.last_cold,
        )  # fmt: skip
        if source is not None:
            candidate.loaded_tokens, candidate.source = loaded, source.instance
            candidate.from_peer = source.is_peer
        candidates.append(candidate)
    return candidates


def price_decode(request: PlacementRequest, workers: Sequence[DecodeWorker]) -> list[WorkerCandidate]:
    """The sequence on each decode worker, which pulls the prompt's KV from the prefill worker."""
    prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
    added_tokens, fingerprint = prompt_tokens + output_tokens // 2, request.fingerprint
    all_expected = request.decode_expected_tokens
    candidates = []
    for worker in workers:
        instance, model, block_tokens = worker.instance, worker.model, worker.block_tokens
        sequences, context_tokens, free_blocks = worker.sequences, worker.context_tokens, worker.free_blocks
        held = all_expected.get(instance, 0)
        if held > prompt_tokens:
            held = prompt_tokens
        step_base_ms, sequence_ms, context_ms = model.step_base_ms, model.sequence_ms, model.context_ms
        n_bytes = -((held - prompt_tokens) // block_tokens) * worker.block_bytes
        transfer_ms = model.pull_ms + model.pull_mib_ms * n_bytes / MIB
        before_ms = step_base_ms + sequence_ms * sequences + context_ms * context_tokens * 1e-3
        after_tokens = context_tokens + added_tokens
        after_ms = step_base_ms + sequence_ms * (sequences + 1) + context_ms * after_tokens * 1e-3
        # The batch turns over once in the time of a whole answer, its pages as its places.
        turnover_ms, wait_ms = output_tokens * before_ms, 0.0
        if free_blocks is not None and context_tokens:
            missing_blocks = -((-prompt_tokens - output_tokens) // block_tokens) - free_blocks
            if missing_blocks > 0:
                wait_ms = turnover_ms * (missing_blocks * block_tokens) / context_tokens
        if worker.max_sequences and sequences >= worker.max_sequences:
            ahead_sequences = sequences - worker.max_sequences + 1
            wait_ms = max(wait_ms, turnover_ms * ahead_sequences / worker.max_sequences)
        step_ms = STEP_WEIGHT_TOKENS * after_ms
        others_ms = STEP_WEIGHT_TOKENS * sequences * (after_ms - before_ms)
        total_ms = transfer_ms + wait_ms + step_ms + others_ms
        refused = worker.refused or ("" if worker.fingerprint == fingerprint else OTHER_MODEL)
        group = (worker.transport, worker.region)
        candidate = WorkerCandidate(
            "decode", instance, group, refused, total_ms, held, context_tokens, others_ms,
            transfer_ms, wait_ms, step_ms,
        )  # fmt: skip
        candidates.append(candidate)
    return candidates


def price_local(
    request: PlacementRequest, worker: DecodeWorker, decode: WorkerCandidate, sources: KvSources | None
) -> WorkerCandidate:
    """Prompt and sequence on one decode worker, of which `decode` is the price of part "decode"."""
    model, prompt_tokens = worker.prefill_model, request.prompt_tokens
    held = min(decode.held_tokens, prompt_tokens - 1)
    prefill_ms = model.compute_ms(prompt_tokens - held, prompt_tokens)
    source, load_ms = None, 0.0
    if sources is not None:
        source, load_ms, prefill_ms = sources.best_read(held, prefill_ms, model, with_peer=False)
    queue_ms = model.queue_ms(worker.queued_tokens, 0)
    # The batch stands still while the prompt is computed.
    others_ms = decode.others_ms + worker.sequences * prefill_ms
    wait_ms, step_ms = decode.decode_queue_ms, decode.step_ms
    total_ms = queue_ms + prefill_ms + load_ms + wait_ms + step_ms + others_ms
    loaded = source.tokens - held if source is not None else 0
    candidate = WorkerCandidate(
        "local", worker.instance, decode.group, decode.refused, total_ms, held, worker.context_tokens,
        others_ms, 0.0, wait_ms, step_ms, prompt_tokens - held - loaded, queue_ms, prefill_ms, load_ms,
    )  # fmt: skip
    if source is not None:
        candidate.loaded_tokens, candidate.source = loaded, source.instance
    return candidate
