"""Chooses the cut of a model over cards that serves the most requests within a time per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from libs.engine.parallel.split import MICRO_BATCH_ROWS
from libs.planner.cards import GIB, Card
from libs.planner.cuts import Cut, enumerate_cuts, reference_cuts
from libs.planner.decode_room import DecodeStepRoom, DraftHeadRoom
from libs.planner.fit import CARD_OVERHEAD_BYTES, CardMemory, Fit, fit_memory
from libs.planner.runnable import DEVICE, cut_refusals
from libs.planner.shapes.model_shape import ModelShape
from libs.planner.times import STEP_TOKENS, StepTimes
from libs.planner.traffic import Traffic
from slipstream.errors import InvalidArgument

DEFAULT_TOKEN_S = 0.05
MAX_SEQUENCES = 4096
_CARD_COUNTS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class CutCapacity:
    """What all replicas of a cut serve with `n_sequences` at once.

    token_s         seconds from token to token of a sequence, prefills of the others included
    bound           what keeps it from more: "KV room", "time per token" or "sequences"
    prefill_share   of the node's time; the ratio of prefill to decode workers that the traffic wants
    """

    n_sequences: int
    token_s: float
    step_s: float
    prefill_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prefill_share: float
    bound: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cut with its memory, and what it serves. `capacity` is None where nothing can be served."""

    fit: Fit
    capacity: CutCapacity | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All candidates, the best first, and why the first one is chosen. `references`: of other engines."""

    model: ModelShape
    card: Card
    n_cards: int
    overhead_bytes: int
    decode_steps: DecodeStepRoom | None
    draft_head: DraftHeadRoom | None
    traffic: Traffic
    candidates: tuple[Candidate, ...]
    references: tuple[Fit, ...]
    reason: str

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def runnable(self) -> Candidate | None:
        """The best cut whose workers this version starts; None: no such cut serves a request."""
        serving = (each for each in self.candidates if each.capacity is not None)
        return next((each for each in serving if not self.refusals(each.fit.cut)), None)

    @property
    def decode_steps_bytes(self) -> int:
        """The memory of each card for decode steps as graphs."""
        return 0 if self.decode_steps is None else self.decode_steps.n_bytes(self.model)

    @property
    def draft_head_bytes(self) -> int:
        """The memory of a draft head on the card of rank 0 of each decode worker."""
        return 0 if self.draft_head is None else self.draft_head.card_bytes

    def worker_arguments(self, candidate: Candidate | None = None) -> dict[str, str]:
        """The flags of a worker of the chosen cut, or another; weights and KV in the dtypes that the plan
        counts."""
        sizes = asdict((candidate or self.chosen).fit.cut.sizes)
        flags = {
            "device": DEVICE,
            "parallel": ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1",
            "memory-bytes": str(self.card.visible_bytes),
            "weight-dtype": "bfloat16",
            "kv-dtype": "bfloat16",
            "step-tokens": str(STEP_TOKENS),
        }
        if self.overhead_bytes != CARD_OVERHEAD_BYTES:
            flags["device-overhead-bytes"] = str(self.overhead_bytes)
        return flags

    def pod_resources(self, candidate: Candidate | None = None) -> dict[str, str]:
        """What the pod of such a worker asks of its node, by the names of Kubernetes.

        Memory has page cache for one copy of the weights, of which each rank reads whole tensors. Huge pages
        are as large as the staged copies.
        """
        fit = (candidate or self.chosen).fit
        return {
            "memory": f"{-(-(fit.host_bytes + self.model.weights_bytes) // GIB)}Gi",
            "hugepages-2Mi": f"{-(-fit.staged_bytes // GIB)}Gi",
            "nvidia.com/gpu": str(fit.cut.group_cards),
        }

    def worker_refusals(self) -> list[InvalidArgument]:
        """Why the engine does not start a worker with these flags; empty: it does."""
        return self.refusals(self.chosen.fit.cut)

    def refusals(self, cut: Cut) -> list[InvalidArgument]:
        """Why this version starts no decode worker of a cut with the plan's steps; empty: it does."""
        return cut_refusals(cut, decode_steps="plain" if self.decode_steps is None else "graphs")


def make_plan(
    model: ModelShape,
    n_cards: int,
    card: Card,
    *,
    traffic: Traffic | None = None,
    overhead_bytes: int = CARD_OVERHEAD_BYTES,
    decode_steps: DecodeStepRoom | None = None,
    draft_head: DraftHeadRoom | None = None,
    max_token_s: float = DEFAULT_TOKEN_S,
) -> Plan:
    """`decode_steps`: as graphs, counted whole on each card; None: decode steps are no graphs.

    `draft_head`: of decode workers, counted on the card of rank 0.

    Raises InvalidArgument when no cut fits, by how much the best one misses.
    """
    traffic = traffic or Traffic()
    memory = CardMemory(
        card.visible_bytes,
        overhead_bytes,
        decode_steps_bytes=0 if decode_steps is None else decode_steps.n_bytes(model),
        draft_head_bytes=0 if draft_head is None else draft_head.card_bytes,
    )
    fits = [fit_memory(model, cut, memory) for cut in enumerate_cuts(model, n_cards)]
    if not any(fit.fits for fit in fits):
        raise _no_room(model, n_cards, card, fits, memory)
    capacities = [_capacity(model, fit, card, traffic, max_token_s) for fit in fits]
    candidates = sorted(map(Candidate, fits, capacities), key=_merit, reverse=True)
    return Plan(
        model,
        card,
        n_cards,
        overhead_bytes,
        decode_steps,
        draft_head,
        traffic,
        candidates=tuple(candidates),
        references=tuple(fit_memory(model, cut, memory) for cut in reference_cuts(model, n_cards)),
        reason=_reason(candidates, max_token_s),
    )


def capacity_at(times: StepTimes, traffic: Traffic, n_sequences: int, bound: str) -> CutCapacity:
    """The steady state of `n_sequences` sequences a worker that prefill and decode on the same cards.

    Each output token of a sequence waits for one step and its share of the others' prefills.
    """
    step = times.decode_step_s(n_sequences, traffic.decode_context_tokens)
    prefill = times.prefill_s(traffic.computed_tokens, traffic.cached_tokens)
    others = n_sequences * prefill / traffic.output_tokens
    token_s = step + others
    n_in_all = n_sequences * times.cut.replicas
    rate = n_in_all / (traffic.output_tokens * token_s)
    return CutCapacity(
        n_sequences=n_in_all,
        token_s=token_s,
        step_s=step,
        prefill_s=prefill,
        requests_per_s=rate,
        output_tokens_per_s=rate * traffic.output_tokens,
        prefill_share=others / token_s,
        bound=bound,
    )


def _capacity(
    model: ModelShape, fit: Fit, card: Card, traffic: Traffic, max_token_s: float
) -> CutCapacity | None:
    """The most sequences whose KV has room and whose tokens come in time; one if even that is too slow."""
    times = StepTimes(model, fit.cut, fit.stages, card)
    longest = traffic.prompt_tokens + traffic.output_tokens
    room = min(int(fit.kv_tokens // longest), MAX_SEQUENCES)
    if not fit.fits or room < 1:
        return None
    others_s = times.prefill_s(traffic.computed_tokens, traffic.cached_tokens) / traffic.output_tokens

    def is_in_time(n: int) -> bool:
        return times.decode_step_s(n, traffic.decode_context_tokens) + n * others_s <= max_token_s

    # More of them would be late by their prefills alone.
    low = _most_sequences(is_in_time, min(room, int(max_token_s / others_s) + 1))
    bound = "time per token" if low < room else "sequences" if room == MAX_SEQUENCES else "KV room"
    return capacity_at(times, traffic, low, bound)


def _most_sequences(is_in_time: Callable[[int], bool], room: int) -> int:
    """The most of up to `room` sequences that are in time; 1 where none are.

    More sequences take longer as long as a step has as many micro-batches.
    """
    low, high = 1, 1
    for begin in range(room - room % MICRO_BATCH_ROWS, -1, -MICRO_BATCH_ROWS):
        low, high = max(begin, 1), min(begin + MICRO_BATCH_ROWS - 1, room)
        if is_in_time(low):
            break
    else:
        return 1
    while low < high:
        middle = (low + high + 1) // 2
        if is_in_time(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _merit(candidate: Candidate) -> tuple[float, float]:
    rate = candidate.capacity.requests_per_s if candidate.capacity else -1.0
    return (rate, float(candidate.fit.card_free_bytes))


def _reason(candidates: list[Candidate], max_token_s: float) -> str:
    best, capacity = candidates[0], candidates[0].capacity
    if capacity is None:
        return "no cut has KV room for one request of this traffic"
    limit = f"within {max_token_s * 1e3:g} ms a token"
    if capacity.token_s > max_token_s:
        limit = f"at {capacity.token_s * 1e3:.1f} ms a token, which no cut undercuts at one sequence"
    text = f"{best.fit.cut.name} serves the most requests {limit}: {capacity.requests_per_s:.2f}/s"
    others = [other for other in candidates[1:] if other.capacity is not None]
    if others:
        second = others[0]
        assert second.capacity is not None
        text += f", {second.fit.cut.name} {second.capacity.requests_per_s:.2f}/s"
        text += f" ({_weakness(second, best)})"
    return f"{text}; bounded by {capacity.bound}"


def _weakness(other: Candidate, best: Candidate) -> str:
    """The first figure in which the other cut is worse."""
    theirs, ours = other.capacity, best.capacity
    assert theirs is not None and ours is not None
    if theirs.bound == "KV room" and other.fit.all_kv_tokens < best.fit.all_kv_tokens:
        return f"KV room for {other.fit.all_kv_tokens:,} tokens instead of {best.fit.all_kv_tokens:,}"
    if theirs.n_sequences < ours.n_sequences:
        return f"{theirs.n_sequences} sequences instead of {ours.n_sequences} at once"
    times = (
        ("a prefill", theirs.prefill_s, ours.prefill_s),
        ("a step", theirs.step_s, ours.step_s),
    )
    for name, their_s, our_s in times:
        if round(their_s * 1e3, 1) > round(our_s * 1e3, 1):
            return f"{name} of {their_s * 1e3:.1f} ms instead of {our_s * 1e3:.1f}"
    return "which differs by less than these figures show"


def _no_room(
    model: ModelShape, n_cards: int, card: Card, fits: list[Fit], memory: CardMemory
) -> InvalidArgument:
    if not fits:
        return InvalidArgument("--gpus", f"{n_cards} cards divide neither the heads nor the layers")
    best = max(fits, key=lambda fit: fit.card_free_bytes)
    missing = -best.card_free_bytes / GIB
    enough = next((n for n in _CARD_COUNTS if n > n_cards and _fits(model, n, memory)), None)
    advice = f"; it fits {enough}" if enough else ""
    head = memory.draft_head_bytes
    beside = f"; the last stage also has {head / GIB:.2f} GiB of the draft head" if head else ""
    steps = memory.decode_steps_bytes
    graphs = f"{steps / GIB:.2f} GiB of decode steps, " if steps else ""
    size = card.visible_bytes / GIB
    return InvalidArgument(
        _option_at_fault(model, n_cards, memory),
        f"{model.name} does not fit {n_cards} x {card.name}: with {best.cut.name}, the best cut, the fullest "
        f"card lacks {missing:.2f} GiB ({best.card_weights_bytes / GIB:.2f} GiB of weights, {graphs}"
        f"{memory.overhead_bytes / GIB:.2f} GiB of overhead in {size:.2f} GiB{beside}){advice}",
    )


def _option_at_fault(model: ModelShape, n_cards: int, memory: CardMemory) -> str:
    """The option without whose memory a cut fits these cards; else that of the cards."""
    usual = min(memory.overhead_bytes, CARD_OVERHEAD_BYTES)
    without = {
        "--decode-steps, --max-batch": replace(memory, decode_steps_bytes=0),
        "--draft-model": replace(memory, draft_head_bytes=0),
        "--overhead-gib": replace(memory, overhead_bytes=usual),
    }
    return next((option for option, less in without.items() if _fits(model, n_cards, less)), "--gpus")


def _fits(model: ModelShape, n_cards: int, memory: CardMemory) -> bool:
    return any(fit_memory(model, cut, memory).fits for cut in enumerate_cuts(model, n_cards))
