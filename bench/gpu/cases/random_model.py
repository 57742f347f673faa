"""A model with random weights, made on the device without files: as a checkpoint of that shape loads."""

from __future__ import annotations

import torch

from bench.gpu.cases.random_weights import normal, random_int4
from libs.engine.kernels.gpu.triton_kernels import GatedWeights, RoutedWeights, TritonKernels
from libs.engine.kernels.interface import Packed
from libs.engine.kernels.layer import Attention, Layer
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model.decoder import Decoder
from libs.engine.model.runner import ModelRunner
from libs.engine.model.stack import FusedStack
from libs.engine.model.weights import ModelWeights
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.matrix import DenseMatrix

_GROUP = 32


class RandomModel:
    """Builds a runner whose experts are INT4, and all else of the kernels' dtype. The KV is random, too."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        # The interpreter computes in fp32 only.
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._kernels = TritonKernels(device, self._dtype)

    def runner(self, *, n_pages: int, block_tokens: int) -> ModelRunner:
        c = self._config
        embedding = normal(self._device, c.vocab_size, c.hidden_size, dtype=self._dtype)
        layers = tuple(self._layer(index) for index in range(c.n_layers))
        head = self._kernels.pack(self._matrix(c.vocab_size, c.hidden_size))
        weights = ModelWeights(embedding, layers, self._ones(c.hidden_size), head)
        stack = FusedStack(c, layers, self._kernels, c.rms_norm_eps)
        kv_dtype = str(self._dtype).removeprefix("torch.")
        cache = PagedLatentCache(
            CacheShape(n_pages, c.n_layers, block_tokens, c.latent_width, kv_dtype), device=str(self._device)
        )
        cache.pages.normal_()
        decoder = Decoder(c, weights, stack, self._kernels, None)
        return ModelRunner(c, decoder, cache, kernels="triton", feature_width=0, weights_digest="random")

    def _layer(self, index: int) -> Layer:
        c = self._config
        is_moe = c.is_moe(index)
        return Layer(
            input_norm=self._ones(c.hidden_size),
            attention=self._attention(),
            post_norm=self._ones(c.hidden_size),
            mlp=self._routed() if is_moe else self._mlp(c.dense_intermediate_size),
        )

    def _attention(self) -> Attention:
        c = self._config
        q_rows = c.n_heads * c.qk_head_dim
        kv_rows = c.n_heads * (c.qk_nope_head_dim + c.v_head_dim)
        return Attention(
            a_proj=self._linear((c.q_lora_rank or q_rows) + c.latent_width, c.hidden_size),
            q_norm=None if c.q_lora_rank is None else self._ones(c.q_lora_rank),
            q_b=None if c.q_lora_rank is None else self._linear(q_rows, c.q_lora_rank),
            kv_norm=self._ones(c.kv_lora_rank),
            kv_b=self._kernels.pack_kv_b(self._matrix(kv_rows, c.kv_lora_rank), c),
            o_proj=self._linear(c.hidden_size, c.n_heads * c.v_head_dim),
        )

    def _routed(self) -> Packed:
        c = self._config
        n, hidden, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        shared = self._mlp(width * c.n_shared_experts) if c.n_shared_experts else None
        return RoutedWeights(
            router=self._matrix(n, hidden).weight.float(),
            correction_bias=torch.zeros(n, device=self._device),
            place_of=torch.arange(n, dtype=torch.int32, device=self._device),
            n_held=n,
            gate_up=random_int4(self._device, n, 2 * width, hidden, _GROUP),
            down=random_int4(self._device, n, hidden, width, _GROUP),
            shared=shared,
            config=c,
        )

    def _mlp(self, width: int) -> GatedWeights:
        hidden = self._config.hidden_size
        return GatedWeights(self._linear(2 * width, hidden), self._linear(hidden, width))

    def _linear(self, rows: int, cols: int) -> Packed:
        return self._kernels.pack(self._matrix(rows, cols))

    def _matrix(self, rows: int, cols: int) -> DenseMatrix:
        return DenseMatrix(normal(self._device, rows, cols, dtype=self._dtype).mul_(cols**-0.5))

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, device=self._device)
