"""Rank 0 of a group: a model of several processes behind the interface of `ModelRunner`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from libs.engine.kernels.interface import Kernels
from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.feature_head import FeatureHead, load_feature_head
from libs.engine.model.inventory import check_inventory
from libs.engine.model.runner import RunnerOptions, cache_shape, check_memory, choose_kernels, choose_threads
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.plan import plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.parallel.commands import send_end, send_step
from libs.engine.parallel.follower_processes import FollowerProcesses
from libs.engine.parallel.limits import check_group
from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.rank_model import RankModel, RankOptions
from libs.engine.parallel.shared_pages import SharedPageMemory
from libs.engine.parallel.sizes import ParallelSizes, check_sizes
from libs.engine.parallel.stage_loader import choose_stages
from libs.engine.step.batch import Batch, ForwardOutput
from libs.engine.step.stop_flag import StepAborted, StopFlag

log = logging.getLogger(__name__)


class GroupBroken(BaseException):
    """A batch failed at a rank, so that the ranks no longer agree: the process has to end.

    It is no Exception, because an engine survives those.
    """


def end_process(reason: str) -> None:
    """End this process at once: a worker without one of its ranks can neither serve nor drain."""
    log.critical("%s", reason)
    logging.shutdown()
    os._exit(1)


class GroupRunner:
    """A loaded model over several processes. Not thread-safe: one thread drives it."""

    def __init__(
        self, model: RankModel, links: GroupLinks, followers: FollowerProcesses, digest: str
    ) -> None:
        self.config = model.config
        self.cache = model.cache
        self.kernels = model.options.runner.kernels
        self.weights_digest = digest
        self.feature_width = 0
        self._feature_head: FeatureHead | None = None
        self._model = model
        self._links = links
        self.followers = followers
        self._rope = Rope(model.config)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: RunnerOptions,
        sizes: ParallelSizes,
        *,
        on_death: Callable[[str], None] = end_process,
    ) -> GroupRunner:
        """Start the other ranks and load all parts. Raises CheckpointError or InvalidArgument.

        A thread calls `on_death` with the reason when another rank ends before `close`, also during the load.
        """
        config = load_config(model_dir)
        check_sizes(sizes, config)
        check_group(sizes, device=options.device, kernels=options.kernels, block_tokens=options.block_tokens)
        head = (
            load_feature_head(options.head_dir, config, choose_kernels(options)) if options.head_dir else None
        )
        memory, rank = _shared_options(model_dir, config, options, sizes, head)
        followers = FollowerProcesses(rank, on_death)
        try:
            links = GroupLinks(rank.place, f"/proc/self/fd/{rank.store}", device=options.device)
            model = RankModel.load(rank, links, memory, options.progress)
            runner = cls(model, links, followers, weights_digest(model_dir))
        except BaseException:
            followers.kill()
            os.close(rank.store)
            raise
        if options.progress is not None:  # other ranks have read the rest
            options.progress.done_bytes = options.progress.total_bytes
        runner._feature_head = head
        runner.feature_width = config.hidden_size if head else 0
        return runner

    @property
    def loaded_kernels(self) -> Kernels:
        """The kernels of rank 0, for a draft head on the same thread."""
        return self._model.kernels

    @torch.inference_mode()
    def forward(self, batch: Batch, stop: StopFlag | None = None) -> ForwardOutput:
        """Run like `ModelRunner.forward`; `stop` counts before the pass only.

        Raises GroupBroken when the pass fails at this rank, which includes a lost connection to another one.
        """
        plan_batch(batch, self.config, self._rope, self.cache)  # refuse before any rank begins
        if stop is not None and stop.is_set:
            raise StepAborted
        wants_features = batch.want_features and self._feature_head is not None
        batch = replace(batch, want_features=wants_features)
        try:
            send_step(self._links, batch)
            output = self._model.run(batch)
        except Exception as error:
            raise GroupBroken(f"a step failed at rank 0 of {self._model.options.sizes}: {error}") from error
        assert output.logits is not None
        if not wants_features or self._feature_head is None:
            return ForwardOutput(output.logits, None, output.scores)
        features = self._feature_head.fuse(output.captured, self._model.kernels)
        return ForwardOutput(output.logits, features, output.scores)

    def close(self) -> None:
        """End the other ranks in order. A process that just ends takes them with it."""
        self.followers.expect_end()
        with contextlib.suppress(RuntimeError):  # a rank is dead
            send_end(self._links)
        self.followers.wait()
        self._links.close()
        os.close(self._model.options.store)


def _shared_options(
    model_dir: Path,
    config: ModelConfig,
    options: RunnerOptions,
    sizes: ParallelSizes,
    head: FeatureHead | None,
) -> tuple[SharedPageMemory, RankOptions]:
    """The shared pages, and the options of rank 0 with the descriptors of them and of an empty store."""
    shape = cache_shape(config, options)
    with Checkpoint(model_dir, options.progress) as checkpoint:
        check_memory(check_inventory(checkpoint, config), shape, options)
        stages = choose_stages(checkpoint, config, sizes)
    log.info("cut by %s; layers of the stages: %s", sizes, [f"{s.start}-{s.stop - 1}" for s in stages])
    threads = max(1, choose_threads(options) // sizes.n_ranks)
    memory = SharedPageMemory(shape.n_pages * shape.page_bytes)
    return memory, RankOptions(
        model_dir=str(model_dir.resolve()),
        rank=0,
        sizes=sizes,
        stage_ends=tuple(stage.stop for stage in stages),
        feature_layers=head.layers if head else (),
        cache=shape,
        runner=replace(options, head_dir=None, progress=None, packed_dir=None, threads=threads),
        store=os.memfd_create("slipstream-ranks"),
        pages=memory.descriptor,
    )
