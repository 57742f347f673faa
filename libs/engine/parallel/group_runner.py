"""Rank 0 of a group: a model of several processes behind the interface of `ModelRunner`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from libs.common.runtime.memory_limit import memory_limit_bytes
from libs.engine.kernels.device import open_device
from libs.engine.kernels.device_name import rank_device
from libs.engine.kernels.interface import Kernels
from libs.engine.kv.cache import CacheShape
from libs.engine.model.checkpoint import Checkpoint, weights_digest
from libs.engine.model.feature_head import FeatureHead, load_feature_head
from libs.engine.model.inventory import check_inventory
from libs.engine.model.runner import RunnerOptions, cache_shape, check_memory, choose_kernels, choose_threads
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.plan import plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.parallel.commands import PageCommand, PageMove, send_end, send_pages, send_step
from libs.engine.parallel.follower_processes import FollowerProcesses
from libs.engine.parallel.limits import check_group, has_separate_pages
from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.rank_model import RankModel, RankOptions
from libs.engine.parallel.shared_pages import SharedPageMemory
from libs.engine.parallel.sizes import ParallelSizes, check_sizes
from libs.engine.parallel.stage_loader import choose_stages
from libs.engine.step.batch import ForwardBatch, ForwardOutput
from libs.engine.step.page_parts import PageParts
from libs.engine.step.stop_flag import StepAborted, StopFlag
from libs.engine.step.turn_lock import TurnLock
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

# Of the pages that ranks collect or take before a step may have its turn: their copy takes about as long as
# a step.
_TURN_BYTES = 64 << 20


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
    """A loaded model over several processes. One thread drives it; any may call `collect` and `scatter`.

    It is the `PageParts` of its engine where each rank has a separate memory.
    """

    def __init__(
        self, model: RankModel, links: GroupLinks, followers: FollowerProcesses, digest: str
    ) -> None:
        self.config = model.config
        # All pages as peers see them, in the layout of one process.
        self.cache = model.pages.host
        self.device = model.pages.device
        self.page_parts: PageParts | None = self if model.pages.is_separate else None
        self.kernels = model.options.runner.kernels
        self.weights_digest = digest
        self.feature_width = 0
        self._feature_head: FeatureHead | None = None
        self._model = model
        self._links = links
        self.followers = followers
        self._rope = Rope(model.config)
        self._turn = TurnLock()
        self._on_death: Callable[[str], None] = end_process
        self._is_closed = False
        self._broken = ""  # the error after which the ranks no longer agree

    @classmethod
    def load(
        cls,
        model_dir: Path,
        options: RunnerOptions,
        sizes: ParallelSizes,
        *,
        on_death: Callable[[str], None] = end_process,
        separate_pages: bool | None = None,
    ) -> GroupRunner:
        """Start the other ranks and load all parts. Raises CheckpointError or InvalidArgument.

        `separate_pages`: whether each rank has a memory of its part of the KV; None: those on devices have.

        A thread calls `on_death` with the reason when another rank ends before `close`, also during the load.
        """
        config = load_config(model_dir)
        check_sizes(sizes, config)
        check_group(sizes, device=options.device, kernels=options.kernels, block_tokens=options.block_tokens)
        head = (
            load_feature_head(options.head_dir, config, choose_kernels(options)) if options.head_dir else None
        )
        open_device(rank_device(options.device, sizes.n_ranks - 1))
        if separate_pages is None:
            separate_pages = has_separate_pages(options.device)
        memory, rank = _shared_options(model_dir, config, options, sizes, head)
        rank = replace(rank, separate_pages=separate_pages)
        log.info("ranks %s", "have separate KV pages" if separate_pages else "share one copy of the KV pages")
        followers = FollowerProcesses(rank, on_death)
        try:
            links = GroupLinks(rank.place, f"/proc/self/fd/{rank.store}", device=rank.device)
            model = RankModel.load(rank, links, memory, options.progress)
            runner = cls(model, links, followers, weights_digest(model_dir))
        except BaseException:
            followers.kill()
            os.close(rank.store)
            raise
        if options.progress is not None:  # other ranks have read the rest
            options.progress.done_bytes = options.progress.total_bytes
        runner._feature_head, runner._on_death = head, on_death
        runner.feature_width = config.hidden_size if head else 0
        return runner

    @property
    def loaded_kernels(self) -> Kernels:
        """The kernels of rank 0, for a draft head on the same thread."""
        return self._model.kernels

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, stop: StopFlag | None = None) -> ForwardOutput:
        """Run like `ModelRunner.forward`; `stop` counts before the pass only.

        Raises GroupBroken when the pass fails at this rank, which includes a lost connection to another one.
        """
        plan_batch(batch, self.config, self._rope, self.cache)  # refuse before any rank begins
        if stop is not None and stop.is_set:
            raise StepAborted
        wants_features = batch.want_features and self._feature_head is not None
        batch = replace(batch, want_features=wants_features)
        with self._command("a step"):
            send_step(self._links, batch)
            output = self._model.run(batch)
        assert output.logits is not None
        if not wants_features or self._feature_head is None:
            return ForwardOutput(output.logits, None, output.scores)
        features = self._feature_head.fuse(output.captured, self._model.kernels)
        return ForwardOutput(output.logits, features, output.scores)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `PageParts`."""
        self._move(PageMove.COPY, [page for pair in pairs for page in pair])

    def collect(self, pages: Sequence[int]) -> None:
        """See `PageParts`."""
        self._move_in_turns(PageMove.COLLECT, pages)

    def scatter(self, pages: Sequence[int]) -> None:
        """See `PageParts`."""
        self._move_in_turns(PageMove.SCATTER, pages)

    def _move_in_turns(self, move: PageMove, pages: Sequence[int]) -> None:
        """Move pages beside steps. The thread may be one of many, so a failure ends the worker from here.

        Not so once the group closes: copies for or by peers may come behind the end of the engine.
        """
        try:
            step = max(1, _TURN_BYTES // self.cache.page_bytes)
            for begin in range(0, len(pages), step):
                self._move(move, list(pages[begin : begin + step]))
        except GroupBroken as error:
            if not self._is_closed:
                self._on_death(str(error))
            raise

    def _move(self, move: PageMove, pages: list[int]) -> None:
        if not pages:
            return
        command = PageCommand(move, pages)
        with self._command(f"a {move.name.lower()} of pages"):
            send_pages(self._links, command)
            self._model.move_pages(command)

    @contextlib.contextmanager
    def _command(self, what: str) -> Iterator[None]:
        """One command at a time. After an error at this rank there is no further one."""
        with self._turn:
            if self._broken:
                raise GroupBroken(self._broken)
            try:
                yield
            except Exception as error:
                self._broken = f"{what} failed at rank 0 of {self._model.options.sizes}: {error}"
                raise GroupBroken(self._broken) from error

    def close(self) -> None:
        """End the other ranks in order. A process that just ends takes them with it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.followers.expect_end()
        with self._turn, contextlib.suppress(RuntimeError):  # a rank is dead
            send_end(self._links)
            self._broken = self._broken or "the group is closed"
        self._links.close()  # beside the other ranks, for which NCCL waits
        self.followers.wait()
        os.close(self._model.options.store)


def _check_memory(weight_bytes: int, shape: CacheShape, options: RunnerOptions) -> None:
    """Ranks on devices each check their part once it is loaded; the host has one place for each page."""
    if not has_separate_pages(options.device):
        return check_memory(weight_bytes, shape, options)
    host_bytes, limit_bytes = shape.n_pages * shape.page_bytes, memory_limit_bytes()
    if host_bytes > limit_bytes:
        raise FailedPrecondition(
            f"pages of {host_bytes / 1e9:.3f} GB on devices pass through as much of the host's memory, which "
            f"has {limit_bytes / 1e9:.3f} GB (--kv-memory-bytes)"
        )


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
        _check_memory(check_inventory(checkpoint, config), shape, options)
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
