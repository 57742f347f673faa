"""The StepModel that computes: ModelRunner for the forward pass, the sampler for the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_graphs import StepGraphs
from libs.engine.kernels.device import wait_for_device
from libs.engine.kernels.interface import Kernels
from libs.engine.kv.cache import LAYOUT_VERSION
from libs.engine.model.runner import ModelRunner
from libs.engine.model_spec.plan import absorbed_row_limit
from libs.engine.sampling.device_draws import samples_on_device
from libs.engine.sampling.sampler import sample
from libs.engine.sampling.token_masks import MaskThread
from libs.engine.step.batch import ForwardBatch, ForwardOutput, Int32Array
from libs.engine.step.device_rows import DeviceRows, FeatureArray
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.page_parts import PageParts
from libs.engine.step.step_model import SequenceRows, StepResult
from libs.engine.step.stop_flag import StepAborted, StopFlag
from libs.engine.step.types import DeviceBytes, EngineInfo, FloatArray
from slipstream.errors import FailedPrecondition

if TYPE_CHECKING:
    from libs.engine.graphs.decode_steps import DecodeSteps, LaunchedTokens
    from libs.engine.parallel.group_runner import GroupRunner


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still compute."""

    tokens: LaunchedTokens

    def result(self) -> StepResult:
        return StepResult(self.tokens.read(), None, None)


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
        graphs: StepGraphs | None = None,
        features_on_device: bool = False,
    ) -> None:
        """`graphs`: how steps of decoding rows run again; None = each is launched program by program.

        `features_on_device`: features are not copied to the host, for a head on the same device.
        """
        self._features_on_device = features_on_device
        self._runner = runner
        self._device = runner.device
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
        self._decode_steps = None if graphs is None else self._open_decode_steps(graphs)

    @property
    def memory(self) -> memoryview | DeviceBytes:
        return self._runner.cache.memory

    @property
    def memory_address(self) -> int:
        return self._runner.cache.address

    @property
    def page_parts(self) -> PageParts | None:
        return self._runner.page_parts

    def close(self) -> None:
        self._runner.close()

    @property
    def kernels(self) -> Kernels:
        """The kernels of the model, for a draft head on the same thread."""
        return self._runner.loaded_kernels

    def run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        if self._decode_steps is not None and stop.is_set:
            raise StepAborted
        with self._ended_on_error():
            return self._run(batch, rows, stop)

    def _run(self, batch: ForwardBatch, rows: Sequence[SequenceRows], stop: StopFlag) -> StepResult:
        chosen = self._run_on_device(batch, rows)
        if chosen is not None:
            return chosen
        masks = self._mask_thread.begin(rows, self.info.vocab_size)
        try:
            output = self._forward(batch, stop)
        finally:
            ready = masks()  # also after an aborted step: no one else may use the constraints until then
        tokens, logprobs = sample(output.logits, rows, ready)
        features = self._outgoing(output.features)
        if not tokens:  # nothing was read, so the device may still write the KV
            wait_for_device(self._device)
        return StepResult(tokens, logprobs, features, output.scores)

    def capture_decode_steps(self, progress: LoadProgress | None = None) -> None:
        """Capture the steps of all batches now, so that no request waits for it."""
        if self._decode_steps is not None:
            self._decode_steps.capture_all((progress or LoadProgress()).note_captures)

    def can_launch(self, rows: Sequence[SequenceRows]) -> bool:
        """See `AheadModel`."""
        return self._decode_steps is not None and all(
            r.n_rows == r.n_sampled == 1 and samples_on_device(r) for r in rows
        )

    def launch(self, batch: ForwardBatch, rows: Sequence[SequenceRows], sources: Int32Array) -> LaunchedStep:
        """See `AheadModel`."""
        with self._ended_on_error():
            tokens = None if self._decode_steps is None else self._decode_steps.launch(batch, rows, sources)
        if tokens is None:
            raise FailedPrecondition("these rows cannot be launched: see can_launch")
        return LaunchedStep(tokens)

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        """After an error wait for what was launched before it: the pages that it writes are free soon."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the first failure is the one to raise
                wait_for_device(self._device)
            raise

    def _run_on_device(self, batch: ForwardBatch, rows: Sequence[SequenceRows]) -> StepResult | None:
        """A step whose tokens are chosen in its graph; None where the host has a part in them."""
        if self._decode_steps is None or not all(samples_on_device(r) for r in rows):
            return None
        launched = self._decode_steps.launch(batch, rows)
        if launched is None:
            return None
        features = self._decode_steps.features_of(batch)
        return StepResult(launched.read(), None, self._outgoing(features))

    def _outgoing(self, features: torch.Tensor | None) -> FeatureArray | None:
        """Features of a step; on the device a copy, since the next step writes into the same buffers."""
        if features is None:
            return None
        if self._features_on_device:
            return DeviceRows(features.clone())
        values: FloatArray = features.float().cpu().numpy()
        return values

    def _forward(self, batch: ForwardBatch, stop: StopFlag) -> ForwardOutput:
        output = None if self._decode_steps is None else self._decode_steps.forward(batch)
        return output or self._runner.forward(batch, stop)

    def _open_decode_steps(self, graphs: StepGraphs) -> DecodeSteps | None:
        runner, kernels = self._runner, self._runner.loaded_kernels
        if not isinstance(runner, ModelRunner) or kernels.name != "triton":
            raise FailedPrecondition("graphs are of the kernels for a CUDA device")
        from libs.engine.graphs.decode_steps import DecodeSteps
        from libs.engine.kernels.gpu.triton_kernels import TritonKernels

        assert isinstance(kernels, TritonKernels)
        most_rows = min(self.info.max_draft_tokens + 1, absorbed_row_limit(runner.config))
        if most_rows < 1:  # no row of this shape takes the form of attention that the buffers are for
            return None
        return DecodeSteps(
            runner,
            kernels,
            graphs,
            BucketLimits(
                self.info.max_batch,
                most_rows,
                has_features=self.info.feature_width > 0 and self.info.max_draft_tokens > 0,
            ),
            max_context_tokens=self.info.max_context_tokens,
        )
