"""The decoder stack: embedding, layers, final norm, head. The life of a batch of rows, top to bottom."""

from __future__ import annotations

import torch

from libs.engine.kernels.interface import Kernels
from libs.engine.model.config import ModelConfig
from libs.engine.model.plan import BatchPlan
from libs.engine.model.weights import Attention, FeatureHead, Layer, ModelWeights


class Decoder:
    """Stateless but for its weights; the cache it reads and writes comes with the plan."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        kernels: Kernels,
        latent_norm_eps: float,
        features: FeatureHead | None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._latent_norm_eps = latent_norm_eps
        self._features = features

    def run(
        self, token_ids: torch.Tensor, plan: BatchPlan, *, want_features: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """token_ids [T] -> residual stream after the last layer [T, H], and features [T, H] if wanted."""
        wanted = self._features.layers if want_features and self._features else ()
        captured: dict[int, torch.Tensor] = {}
        x = self._weights.embedding[token_ids].float()
        for index, layer in enumerate(self._weights.layers):
            x = self._layer(x, layer, index, plan)
            if index in wanted:
                captured[index] = x.clone()  # layers add into x in place
        if not wanted or self._features is None:
            return x, None
        fused = torch.cat([captured[index] for index in wanted], dim=-1)
        return x, self._kernels.linear(fused, self._features.fc)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [R, H] -> [R, V] fp32."""
        normed = self._kernels.rms_norm(x, self._weights.norm, self._config.rms_norm_eps)
        return self._kernels.linear(normed, self._weights.head)

    def _layer(self, x: torch.Tensor, layer: Layer, index: int, plan: BatchPlan) -> torch.Tensor:
        kernels, config = self._kernels, self._config
        normed = kernels.rms_norm(x, layer.input_norm, config.rms_norm_eps)
        mixed = self._attention(normed, layer.attention, index, plan)
        x = kernels.linear(mixed, layer.attention.o_proj, residual=x)
        normed = kernels.rms_norm(x, layer.post_norm, config.rms_norm_eps)
        if config.is_moe(index):
            return kernels.moe(normed, layer.mlp, residual=x)
        return kernels.mlp(normed, layer.mlp, residual=x)

    def _attention(self, x: torch.Tensor, weights: Attention, index: int, plan: BatchPlan) -> torch.Tensor:
        """Multi-head latent attention: [T, H] -> [T, heads * v], writing the rows' latents on the way."""
        kernels, config = self._kernels, self._config
        a = kernels.linear(x, weights.a_proj)
        q, kv_a = a[:, : -config.latent_width], a[:, -config.latent_width :]
        if weights.q_norm is not None:
            q = kernels.linear(kernels.rms_norm(q, weights.q_norm, self._latent_norm_eps), weights.q_b)
        q = q.reshape(plan.n_rows, config.n_heads, config.qk_head_dim)
        kernels.rotate_queries(q, config.qk_rope_head_dim, plan.cos_sin)
        kernels.store_latent(kv_a, weights.kv_norm, self._latent_norm_eps, index, plan)
        return kernels.attend(q, weights.kv_b, index, plan, config)
