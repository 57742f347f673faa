"""Ways to cut a model over cards: those of a worker's `--parallel`, and replicas of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from libs.engine.parallel.sizes import ParallelSizes
from libs.planner.cards import NODE_CARDS
from libs.planner.shapes.model_shape import LayerShape, ModelShape

PAGE_TOKENS = 64  # of a KV page by default, whose slots a KV split divides


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """tp cards share each layer, pp groups of them follow one another.

    kv                 parts of the context's positions, on cards that share the same heads
    dp                 parts of the cards, each with all attention and its own sequences
    ep                 parts of the cards with different experts; cards of a part share each of its experts
    replicas           workers of this cut, each with all weights and its own requests
    exchanges_queries  with kv: cards exchange queries, so that no projection is copied (other engines)
    """

    tp: int
    pp: int = 1
    kv: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1
    exchanges_queries: bool = False

    @property
    def group_cards(self) -> int:
        """Cards of one worker."""
        return self.tp * self.pp

    @property
    def n_cards(self) -> int:
        return self.group_cards * self.replicas

    @property
    def sizes(self) -> ParallelSizes:
        """The form of a worker's `--parallel`."""
        return ParallelSizes(self.tp // (self.kv * self.dp), self.pp, self.ep, self.dp, self.kv)

    @property
    def attention_cards(self) -> int:
        """Cards that share the attention of a sequence."""
        return self.tp // self.dp

    @property
    def heads_copies(self) -> int:
        """How many of these cards have the projections to the same heads."""
        return 1 if self.exchanges_queries else self.kv

    @property
    def group_name(self) -> str:
        parts = [f"TP{self.attention_cards}"] if self.attention_cards > 1 else []
        parts += [f"DP{self.dp}"] * (self.dp > 1) + [f"PP{self.pp}"] * (self.pp > 1)
        extra = f" + EP{self.ep}" * (self.ep > 1) + f" + KV split {self.kv}" * (self.kv > 1)
        return (" x ".join(parts) or "one card") + extra + ", queries exchanged" * self.exchanges_queries

    @property
    def name(self) -> str:
        return f"{self.replicas} replicas of {self.group_name}" if self.replicas > 1 else self.group_name


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on one group of cards."""

    layers: tuple[LayerShape, ...]
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_params: int = 0

    def card_bytes(self, cut: Cut) -> int:
        """Weights of one card. Everything is divided, but copied attention or projections."""
        attention = sum(layer.attention_bytes for layer in self.layers)
        others = sum(layer.bytes - layer.attention_bytes for layer in self.layers)
        others += self.embedding_bytes + self.head_bytes
        attention += (cut.heads_copies - 1) * sum(layer.heads_bytes for layer in self.layers)
        return -(-(attention * cut.dp + others) // cut.tp)

    @cached_property
    def counted_layers(self) -> tuple[tuple[LayerShape, int], ...]:
        """Each shape of layer, and how many layers have it: two shapes of the 61 layers of Kimi-K2.5."""
        return tuple(Counter(self.layers).items())

    @cached_property
    def kv_token_bytes(self) -> int:
        return sum(layer.kv_token_bytes for layer in self.layers)

    @cached_property
    def kv_window_bytes(self) -> int:
        return sum(layer.kv_window_bytes for layer in self.layers)


def enumerate_cuts(model: ModelShape, n_cards: int) -> Iterator[Cut]:
    """All cuts over exactly `n_cards` that divide heads and experts evenly, as one worker or as replicas."""
    for replicas in _divisors(n_cards):
        for pp in _divisors(n_cards // replicas):
            if pp <= len(model.layers):
                yield from _stage_cuts(model, n_cards // (replicas * pp), pp, replicas)


def reference_cuts(model: ModelShape, n_cards: int) -> Iterator[Cut]:
    """Cuts of other engines, which this one does not run: a KV split within a node that exchanges queries."""
    group = min(n_cards, NODE_CARDS)
    kv = group // model.kv_heads
    if kv > 1 and not (n_cards % group or group % kv or PAGE_TOKENS % kv or model.n_heads % (group // kv)):
        yield Cut(group, kv=kv, replicas=n_cards // group, exchanges_queries=True)


def _stage_cuts(model: ModelShape, tp: int, pp: int, replicas: int) -> Iterator[Cut]:
    n_experts = max(layer.n_experts for layer in model.layers)
    parts_of_experts = [ep for ep in _divisors(tp) if ep == 1 or (n_experts and n_experts % ep == 0)]
    for dp in _divisors(tp):
        for kv in _divisors(tp // dp):
            heads = tp // (dp * kv)
            # A split before the heads of KV are divided would only add exchanges.
            is_split = kv == 1 or (heads >= model.kv_heads and PAGE_TOKENS % kv == 0)
            if model.n_heads % heads == 0 and is_split:
                yield from (Cut(tp, pp, kv, dp, ep, replicas) for ep in parts_of_experts)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@lru_cache(maxsize=64)
def cut_stages(model: ModelShape, n_stages: int) -> tuple[Stage, ...]:
    """Divide the layers so that the largest stage has the fewest bytes; then the largest but one, and so on.

    Embedding and vision lie on the first stage, the head on the last. Equal stages are one object.
    """
    layers = model.layers
    prefix = [0]
    for layer in layers:
        prefix.append(prefix[-1] + layer.bytes)
    first, last = model.embedding_bytes + model.vision_bytes, model.head_bytes

    def stage_bytes(begin: int, end: int) -> int:
        extra = (first if begin == 0 else 0) + (last if end == len(layers) else 0)
        return prefix[end] - prefix[begin] + extra

    @cache
    def best(begin: int, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(bytes of the stages, largest first; ends of the stages) of the layers from `begin`."""
        if stages == 1:
            return (stage_bytes(begin, len(layers)),), (len(layers),)
        found: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        for end in range(begin + 1, len(layers) - stages + 2):
            own = stage_bytes(begin, end)
            if found is not None and own > found[0][0]:
                break
            sizes, ends = best(end, stages - 1)
            candidate = (tuple(sorted((own, *sizes), reverse=True)), (end, *ends))
            if found is None or candidate[0] < found[0]:
                found = candidate
        assert found is not None
        return found

    ends = best(0, n_stages)[1]
    begins = (0, *ends[:-1])
    stages = (
        Stage(
            layers[begin:end],
            embedding_bytes=first if begin == 0 else 0,
            head_bytes=last if end == len(layers) else 0,
            head_params=model.head_params if end == len(layers) else 0,
        )
        for begin, end in zip(begins, ends, strict=True)
    )
    same: dict[Stage, Stage] = {}
    return tuple(same.setdefault(stage, stage) for stage in stages)
