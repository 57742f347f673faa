"""Ways to cut a model over cards: tensor, pipeline and expert parallelism, and KV split by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from libs.planner.model_shape import LayerShape, ModelShape

PAGE_TOKENS = 64  # of a KV page by default, whose slots a KV split divides


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """tp cards share each layer, pp groups of them follow one another.

    kv                 parts of the context's positions, on cards that share the same heads
    dp                 parts of the cards, each with all attention and its own sequences; experts are divided
    exchanges_queries  with kv: cards exchange queries, so that no projection is copied (other engines)
    """

    tp: int
    pp: int = 1
    kv: int = 1
    dp: int = 1
    exchanges_queries: bool = False

    @property
    def n_cards(self) -> int:
        return self.tp * self.pp

    @property
    def is_attention_copied(self) -> bool:
        """Whether groups of cards, or single ones, attend for different sequences (DP + EP)."""
        return self.dp > 1

    @property
    def attention_cards(self) -> int:
        """Cards that share the attention of a sequence."""
        return self.tp // self.dp

    @property
    def heads_copies(self) -> int:
        """How many of these cards have the projections to the same heads."""
        return 1 if self.exchanges_queries else self.kv

    @property
    def name(self) -> str:
        stages = f" x PP{self.pp}" if self.pp > 1 else ""
        if self.is_attention_copied:
            return f"DP{self.dp} attention + EP{self.tp}{stages}"
        if self.tp == 1:
            return f"PP{self.pp}" if self.pp > 1 else "one card"
        return f"TP{self.tp}{stages}{f' + KV split {self.kv}' if self.kv > 1 else ''}"


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
    """All cuts over exactly `n_cards` that divide heads and experts evenly."""
    n_experts = max(layer.n_experts for layer in model.layers)
    for tp in range(1, n_cards + 1):
        pp = n_cards // tp
        if tp * pp != n_cards or pp > len(model.layers):
            continue
        if model.n_heads % tp == 0:
            yield Cut(tp, pp)
            # A split before the heads of KV are divided would only add exchanges.
            for kv in range(2, tp // model.kv_heads + 1):
                if tp % kv == 0 and PAGE_TOKENS % kv == 0:
                    yield Cut(tp, pp, kv)
        if tp > 1 and n_experts and n_experts % tp == 0:
            yield Cut(tp, pp, dp=tp)


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
