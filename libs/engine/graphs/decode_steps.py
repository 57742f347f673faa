"""Decode steps of one model on fixed buffers: the forward pass, and the choice of tokens behind it.

Steps follow one another on the device. The tokens of a step stay there, so that the next one can take them
before the host has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from libs.engine.graphs.buckets import BucketLimits, StepBucket, choose_bucket, planned_buckets
from libs.engine.graphs.step_graphs import StepGraph, StepGraphs
from libs.engine.graphs.step_inputs import StepInputs
from libs.engine.kernels.gpu.sampling_cut import cut_rows
from libs.engine.model_spec.plan import plan_batch
from libs.engine.sampling.device_draws import DrawArrays, choose_tokens, draw_arrays
from libs.engine.step.batch import ForwardBatch, ForwardOutput, Int32Array
from libs.engine.step.step_model import SequenceRows

if TYPE_CHECKING:
    from libs.engine.kernels.gpu.triton_kernels import TritonKernels
    from libs.engine.model.runner import ModelRunner

_CHOICES = ((False, False), (True, False), (True, True))  # whether any row draws, and cuts what it draws from


class LaunchedTokens:
    """Tokens that the device may still compute, on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        cuda: Any = torch.cuda
        self._copied: Any = None
        if not tokens.is_cuda:
            self._tokens = tokens.clone()
            return
        self._tokens = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True)
        self._tokens.copy_(tokens, non_blocking=True)
        self._copied = cuda.Event()
        self._copied.record(torch.cuda.current_stream(tokens.device))

    def read(self) -> list[int]:
        """Wait for the tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class DecodeSteps:
    """Captures a step of each bucket by `capture_all`, or when it first runs. One thread drives it.

    logits [T, V], features [T, H] and tokens [T] of the last step are overwritten by the next.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kernels: TritonKernels,
        graphs: StepGraphs,
        limits: BucketLimits,
        *,
        max_context_tokens: int,
    ) -> None:
        self._runner = runner
        self._kernels = kernels
        self._graphs = graphs
        self._limits = limits
        self._max_context_tokens = max_context_tokens
        n_rows, device = limits.max_rows, kernels.device
        self.logits = torch.zeros(n_rows, runner.config.vocab_size, device=device)
        width = runner.feature_width if limits.has_features else 0
        self.features = torch.zeros(n_rows, width, dtype=kernels.dtype, device=device)
        self.tokens = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self._inputs: dict[StepBucket, StepInputs] = {}
        self._forwards: dict[StepBucket, StepGraph] = {}
        self._choices: dict[tuple[StepBucket, bool, bool], StepGraph] = {}

    @torch.inference_mode()
    def capture_all(self, on_captured: Callable[[int, int], None] = lambda n_done, n_all: None) -> None:
        """Capture all steps, the largest first: the smaller ones use its memory again.

        Then no later step is captured. Calls `on_captured` with the buckets that are done, and with all.
        """
        buckets = planned_buckets(self._limits)
        for n_done, bucket in enumerate(buckets):
            on_captured(n_done, len(buckets))
            self._inputs_of(bucket)
            self._forward_of(bucket)
            for draws, cuts in _CHOICES:
                self._choice_of(bucket, draws, cuts)
        on_captured(len(buckets), len(buckets))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """The logits of a batch, in the buffers; None for a batch without a bucket."""
        if self._run_forward(batch, None, None) is None:
            return None
        return ForwardOutput(self.logits[: batch.n_rows], self.features_of(batch))

    def features_of(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The features that the last step, which was that of `batch`, has computed."""
        if not batch.want_features or not self._limits.has_features:
            return None
        return self.features[: batch.n_rows]

    @torch.inference_mode()
    def launch(
        self, batch: ForwardBatch, rows: Sequence[SequenceRows], sources: Int32Array | None = None
    ) -> LaunchedTokens | None:
        """Begin a step whose rows all sample on the device; None for a batch without a bucket.

        Row i takes the token that row sources[i] of the step before chose; where that is -1, the batch's.
        """
        draws = draw_arrays(rows)
        bucket = self._run_forward(batch, sources, draws)
        if bucket is None:
            return None
        self._choice_of(bucket, draws.any_drawn, draws.any_drawn and draws.any_cut).replay()
        return LaunchedTokens(self.tokens[: batch.n_rows])

    def _run_forward(
        self, batch: ForwardBatch, sources: Int32Array | None, draws: DrawArrays | None
    ) -> StepBucket | None:
        bucket = choose_bucket(batch, self._limits)
        if bucket is None:
            return None
        plan = plan_batch(batch, self._runner.config, self._runner.rope, self._runner.cache)
        self._inputs_of(bucket).fill(batch, plan, sources, draws)
        self._forward_of(bucket).replay()
        return bucket

    def _forward_of(self, bucket: StepBucket) -> StepGraph:
        forward = self._forwards.get(bucket)
        if forward is None:
            name = f"{bucket.n_sequences} sequences of {bucket.rows_each} rows"
            name += " with features" * bucket.wants_features
            forward = self._graphs.capture(name, partial(self._compute, bucket))
            self._forwards[bucket] = forward
        return forward

    def _choice_of(self, bucket: StepBucket, draws: bool, cuts: bool) -> StepGraph:
        key = (bucket.shape, draws, cuts)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._graphs.capture(f"a choice of {bucket.n_rows} tokens", partial(self._choose, *key))
            self._choices[key] = choice
        return choice

    def _inputs_of(self, bucket: StepBucket) -> StepInputs:
        inputs = self._inputs.get(bucket.shape)
        if inputs is None:
            config, cache = self._runner.config, self._runner.cache
            inputs = self._inputs[bucket.shape] = StepInputs(
                bucket,
                cache,
                rope_pairs=config.qk_rope_head_dim // 2,
                n_blocks=-(-self._max_context_tokens // cache.shape.block_tokens),
                n_splits=self._kernels.count_splits(bucket.n_sequences, bucket.rows_each, config.n_heads),
                device=self._kernels.device,
            )
        return inputs

    def _compute(self, bucket: StepBucket) -> None:
        """The captured forward pass. Nothing in it waits for the host, or copies from it."""
        inputs = self._inputs[bucket.shape]
        self._kernels.bind(inputs.plan, inputs.device_plan, inputs.splits)
        before = self.tokens[inputs.sources.clamp(min=0)].clamp(min=0)
        token_ids = torch.where(inputs.sources >= 0, before, inputs.token_ids.long())
        decoder = self._runner.decoder
        x, features = decoder.run(token_ids, inputs.plan, want_features=bucket.wants_features)
        self.logits[: bucket.n_rows].copy_(decoder.logits(x))
        if features is not None:
            self.features[: bucket.n_rows].copy_(features)

    def _choose(self, bucket: StepBucket, draws: bool, cuts: bool) -> None:
        """The captured choice of tokens."""
        parameters = self._inputs[bucket.shape].draws if draws else None
        chosen = choose_tokens(self.logits[: bucket.n_rows], parameters, cut_rows if cuts else None)
        self.tokens[: bucket.n_rows].copy_(chosen)
