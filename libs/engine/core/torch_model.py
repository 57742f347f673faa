"""The StepModel that computes: ModelRunner for the forward pass, the sampler for the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from libs.engine.kernels.interface import Kernels
from libs.engine.kv.cache import LAYOUT_VERSION
from libs.engine.model.runner import ModelRunner
from libs.engine.sampling.sampler import sample
from libs.engine.sampling.token_masks import MaskThread
from libs.engine.step.batch import Batch
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StopFlag
from libs.engine.step.types import DeviceBytes, EngineInfo

if TYPE_CHECKING:
    from libs.engine.parallel.group_runner import GroupRunner


class TorchModel:
    """A loaded checkpoint with its paged cache."""

    def __init__(
        self,
        runner: ModelRunner | GroupRunner,
        *,
        max_batch: int,
        max_draft_tokens: int,
        max_context_tokens: int | None = None,
        drafter_digest: str = "",
    ) -> None:
        self._runner = runner
        self._mask_thread = MaskThread()
        shape = runner.cache.shape
        self.info = EngineInfo(
            vocab_size=runner.config.vocab_size,
            block_tokens=shape.block_tokens,
            page_bytes=runner.cache.page_bytes,
            n_pages=shape.n_pages,
            hidden_size=runner.config.hidden_size,
            max_context_tokens=min(
                max_context_tokens or runner.config.max_position_tokens, shape.n_pages * shape.block_tokens
            ),
            kv_dtype=shape.kv_dtype,
            layout_version=LAYOUT_VERSION,
            weights_digest=runner.weights_digest,
            drafter_digest=drafter_digest,
            feature_width=runner.feature_width,
            max_batch=max_batch,
            max_draft_tokens=max_draft_tokens,
        )

    @property
    def memory(self) -> memoryview | DeviceBytes:
        return self._runner.cache.memory

    @property
    def memory_address(self) -> int:
        return self._runner.cache.address

    @property
    def kernels(self) -> Kernels:
        """The kernels of the model, for what else runs on its thread."""
        return self._runner.loaded_kernels

    def run(self, batch: Batch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        masks = self._mask_thread.begin(rows, self.info.vocab_size)
        try:
            output = self._runner.forward(batch, stop)
        finally:
            ready = masks()  # also after an aborted step: no one else may use the constraints until then
        tokens, logprobs = sample(output.logits, rows, ready)
        features = None if output.features is None else output.features.float().cpu().numpy()
        return StepResult(tokens, logprobs, features, output.scores)
