"""The inputs of a plan about a model: bytes, multiplications and KV bytes of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.errors import InvalidArgument

# A plan costs the square of the layers.
MAX_LAYERS = 512


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer.

    attention_bytes   its attention weights and norms
    heads_bytes       of these, the projections from which heads have their queries, keys and values
    heads_params      the weights of those projections
    attention_params  all its attention weights, without norms
    shared_bytes      what else every token reads: dense MLP, shared experts, the router of experts
    expert_bytes      one routed expert, scales included
    kv_token_bytes    KV cache of a context token; 0: the layer keeps a fixed window instead
    kv_window_bytes   KV cache of a sequence whose window is full
    active_params     weights that a token is multiplied with
    context_flops     operations of a query token for a context token in the absorbed or plain form (decode)
    prefill_flops     the same in the form that prefill uses
    """

    attention_bytes: int
    heads_bytes: int
    heads_params: int
    attention_params: int
    shared_bytes: int
    expert_bytes: int
    n_experts: int
    experts_per_token: int
    kv_token_bytes: int
    kv_window_bytes: int
    active_params: int
    context_flops: int
    prefill_flops: int

    @property
    def experts_bytes(self) -> int:
        return self.n_experts * self.expert_bytes

    @property
    def bytes(self) -> int:
        return self.attention_bytes + self.shared_bytes + self.experts_bytes

    def expert_hits(self, n_tokens: float) -> float:
        """Distinct experts that `n_tokens` tokens reach under uniform routing: E (1 - (1 - k/E)^T).

        Real routing is more skewed, so this is an upper bound.
        """
        if not self.n_experts:
            return 0.0
        missed: float = (1.0 - self.experts_per_token / self.n_experts) ** n_tokens
        return self.n_experts * (1.0 - missed)

    def fullest_part_hits(self, n_tokens: float, n_parts: int) -> float:
        """Expected hits of the part with the most, where each of `n_parts` has E / n_parts experts.

        About mean + sqrt(2 ln(parts) variance): the largest of as many independent normal counts.
        """
        hits = self.expert_hits(n_tokens)
        if n_parts == 1 or not hits:
            return hits
        mean, most = hits / n_parts, self.n_experts / n_parts
        variance = mean * (1 - hits / self.n_experts)
        return min(mean + math.sqrt(2 * math.log(n_parts) * variance), most)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model.

    kv_heads            tensor parallelism over more cards than that copies the KV cache
    attention_width     values of all heads for a token, before the output projection
    embedding_bytes     lie with the first layer, vision_bytes too; head_bytes with the last layer
    stored_value_bytes  of a weight in the checkpoint; None: most are INT4, which is held as it is stored
    """

    name: str
    layers: tuple[LayerShape, ...]
    hidden_size: int
    n_heads: int
    kv_heads: int
    embedding_bytes: int
    head_bytes: int
    head_params: int
    attention_width: int
    vision_bytes: int
    max_context_tokens: int
    stored_value_bytes: int | None = 2

    @property
    def vocab_size(self) -> int:
        return self.head_params // self.hidden_size

    @property
    def weights_bytes(self) -> int:
        layers = sum(layer.bytes for layer in self.layers)
        return layers + self.embedding_bytes + self.head_bytes + self.vision_bytes

    @property
    def kv_token_bytes(self) -> int:
        """KV cache of one context token over all layers, stored once."""
        return sum(layer.kv_token_bytes for layer in self.layers)

    @property
    def kv_window_bytes(self) -> int:
        """KV cache of one sequence in the layers that keep a window."""
        return sum(layer.kv_window_bytes for layer in self.layers)


def check_layers(n_layers: int) -> None:
    """Raises InvalidArgument for a model with more layers than a plan divides."""
    if n_layers > MAX_LAYERS:
        raise InvalidArgument("num_hidden_layers", f"{n_layers} exceed the {MAX_LAYERS} that are planned")
