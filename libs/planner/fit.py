"""Whether a cut fits its memory, and how many distinct context tokens the rest of the memory holds.

The plan of a node's cards and the page pool of a worker at its start come from the same `fit_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libs.planner.cards import GIB
from libs.planner.cuts import Cut, Stage, cut_stages
from libs.planner.shapes.model_shape import ModelShape

# Context, communication and activations of one card.
CARD_OVERHEAD_BYTES = int(2.5 * GIB)
# Interpreter, torch, gRPC, and the activations of a step of one process.
PROCESS_OVERHEAD_BYTES = GIB // 2
# Copies of pages. The kernel commits their memory when a copy first reaches it.
_MAX_STAGING_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class Staging:
    """Copies that peers read, in the memory of the host: `share` of the KV cache, at most `most_bytes`."""

    share: float = 0.5
    most_bytes: int = _MAX_STAGING_BYTES

    def n_bytes(self, kv_bytes: int) -> int:
        return min(int(kv_bytes * self.share), self.most_bytes)

    def kv_room(self, n_bytes: int) -> int:
        """The largest KV cache that fits `n_bytes` together with its copies."""
        return max(int(n_bytes / (1 + self.share)), n_bytes - self.most_bytes)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """`n_bytes` of each card. Each has its own weights and its own part of the KV.

    decode_steps_bytes  of decode steps as graphs (libs/engine/graphs/step_memory.py); 0: they are no graphs
    draft_head_bytes    of a draft head and its features (libs/engine/eagle/head_memory.py), on the card of
                        rank 0 alone, in the last stage; 0: none
    """

    n_bytes: int
    overhead_bytes: int = CARD_OVERHEAD_BYTES
    decode_steps_bytes: int = 0
    draft_head_bytes: int = 0

    @property
    def apart_bytes(self) -> int:
        """What is neither weights nor KV, of each card."""
        return self.overhead_bytes + self.decode_steps_bytes

    def overhead_text(self, cut: Cut) -> str:
        steps = f", {self.decode_steps_bytes} of decode steps" if self.decode_steps_bytes else ""
        head = f", {self.draft_head_bytes} of the draft head" if self.draft_head_bytes else ""
        return f"{self.overhead_bytes} bytes of overhead{steps}{head}"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`n_bytes` of the host for all ranks, which share one copy of the KV. Staged copies are there, too."""

    n_bytes: int
    staging: Staging = Staging()

    def overhead_text(self, cut: Cut) -> str:
        return f"{cut.group_cards * PROCESS_OVERHEAD_BYTES} bytes of overhead, staged copies"


@dataclass(frozen=True, slots=True)
class HeldForm:
    """Bytes of a weight and of a cached value in memory; bf16 by default. INT4 stays as it is stored."""

    weight_value_bytes: int = 2
    kv_value_bytes: int = 2

    def weight_bytes(self, model: ModelShape, n_bytes: int) -> int:
        """Memory for `n_bytes` of the checkpoint."""
        if model.stored_value_bytes is None:
            return n_bytes
        return n_bytes * self.weight_value_bytes // model.stored_value_bytes

    def kv_bytes(self, n_bytes: int) -> int:
        """Memory for `n_bytes` of KV in bf16."""
        return n_bytes * self.kv_value_bytes // 2


IN_BF16 = HeldForm()


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of one worker with a cut. All bytes are of one card or of the worker; a host counts as one card.

    card_weights_bytes  of the fullest card
    card_free_bytes     of the fullest card after weights and overhead; negative: what is missing
    group_free_bytes    of all cards together
    kv_tokens           distinct context tokens that the worker can hold, in the layers that keep all of them
    kv_bytes            their bytes, stored once
    """

    cut: Cut
    stages: tuple[Stage, ...]
    card_weights_bytes: int
    card_free_bytes: int
    group_free_bytes: int
    kv_tokens: int
    kv_bytes: int

    @property
    def fits(self) -> bool:
        return self.card_free_bytes >= 0

    @property
    def all_kv_tokens(self) -> int:
        """KV tokens of all replicas together. Two replicas may hold the same context."""
        return self.cut.replicas * self.kv_tokens

    @property
    def staged_bytes(self) -> int:
        """Host memory for copies of a worker's pages."""
        return Staging().n_bytes(self.kv_bytes)

    @property
    def host_pages_bytes(self) -> int:
        """Host memory through which pages of several cards pass: the ranks of a group have parts of each."""
        return self.kv_bytes if self.cut.group_cards > 1 else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of a worker's processes, pages and staged copies, without page cache."""
        processes = self.cut.group_cards * PROCESS_OVERHEAD_BYTES
        return processes + self.host_pages_bytes + self.staged_bytes


def fit_memory(
    model: ModelShape,
    cut: Cut,
    memory: CardMemory | HostMemory,
    *,
    held: HeldForm = IN_BF16,
) -> Fit:
    """What is free. In models with windows, those of one sequence are kept."""
    stages = cut_stages(model, cut.pp)
    weights = [held.weight_bytes(model, stage.card_bytes(cut)) for stage in stages]
    windows = [held.kv_bytes(stage.kv_window_bytes) for stage in stages]
    token_bytes = held.kv_bytes(model.kv_token_bytes)
    if isinstance(memory, HostMemory):
        in_use = sum(weights) * cut.tp
        free = [memory.n_bytes - cut.group_cards * PROCESS_OVERHEAD_BYTES - in_use]
        tokens = max(memory.staging.kv_room(free[0] - sum(windows)), 0) // token_bytes
        return Fit(cut, stages, in_use, free[0], free[0], tokens, tokens * token_bytes)
    free = [memory.n_bytes - memory.apart_bytes - size for size in weights]
    group_free_bytes = sum(free) * cut.tp - memory.draft_head_bytes
    free[-1] -= memory.draft_head_bytes  # all cards of a stage have the same number of pages
    tokens = min(
        _stage_tokens(held.kv_bytes(stage.kv_token_bytes), cut, model, room, window)
        for stage, room, window in zip(stages, free, windows, strict=True)
    )
    return Fit(
        cut=cut,
        stages=stages,
        card_weights_bytes=max(weights),
        card_free_bytes=min(free),
        group_free_bytes=group_free_bytes,
        kv_tokens=tokens,
        kv_bytes=tokens * token_bytes,
    )


def memory_for_tokens(
    model: ModelShape,
    cut: Cut,
    memory: CardMemory | HostMemory,
    n_tokens: int,
    *,
    held: HeldForm = IN_BF16,
) -> int:
    """The least `n_bytes` of such a memory with which `fit_memory` has room for `n_tokens`."""
    low, high = 0, 1
    while _room(model, cut, memory, high, held) < n_tokens:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _room(model, cut, memory, middle, held) < n_tokens:
            low = middle
        else:
            high = middle
    return high


def _room(model: ModelShape, cut: Cut, memory: CardMemory | HostMemory, n_bytes: int, held: HeldForm) -> int:
    return fit_memory(model, cut, replace(memory, n_bytes=n_bytes), held=held).kv_tokens


def kv_shares(model: ModelShape, cut: Cut) -> int:
    """Over how many cards of a group the KV of a sequence, or of the sequences, is divided."""
    heads = cut.tp // (cut.kv * cut.dp)
    return cut.dp * cut.kv * min(heads, model.kv_heads)


def _stage_tokens(token_bytes: int, cut: Cut, model: ModelShape, room: int, window_bytes: int) -> int:
    shares = kv_shares(model, cut)
    room -= window_bytes * cut.dp // shares  # the windows of one sequence of the card
    if room <= 0:
        return 0
    if not token_bytes:
        return model.max_context_tokens
    return room * shares // token_bytes
