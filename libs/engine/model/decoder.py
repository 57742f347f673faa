"""The decoder: embedding, layers, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from libs.engine.kernels.interface import Kernels
from libs.engine.model.feature_head import FeatureHead
from libs.engine.model.stack import Stack
from libs.engine.model.weights import ModelWeights
from libs.engine.model_spec.config import ModelConfig
from libs.engine.model_spec.plan import BatchPlan
from libs.engine.step.stop_flag import StopFlag


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoder of one model. Its only state is the weights; the plan has the cache."""

    config: ModelConfig
    weights: ModelWeights
    stack: Stack
    kernels: Kernels
    feature_head: FeatureHead | None

    def run(
        self, token_ids: torch.Tensor, plan: BatchPlan, *, want_features: bool, stop: StopFlag | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """token_ids [T] -> residual stream after the last layer [T, H], and features [T, H] if wanted.

        Raises StepAborted as `Stack.run` does.
        """
        x = self.weights.embedding[self.kernels.place(token_ids)].float()
        if self.feature_head is None or not want_features:
            self.stack.run(x, plan, (), stop)
            return x, None
        captured = self.stack.run(x, plan, self.feature_head.layers, stop)
        return x, self.feature_head.fuse(captured, self.kernels)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [R, H] -> [R, V] fp32."""
        normed = self.kernels.rms_norm(x, self.weights.norm, self.config.rms_norm_eps)
        return self.kernels.logits(normed, self.weights.head)
