"""One rank's part of the model: it runs the same batches as all other ranks of its group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from libs.engine.kernels.device import free_device_bytes
from libs.engine.kernels.device_name import rank_device
from libs.engine.kernels.interface import Kernels, ShareKernels
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model.checkpoint import Checkpoint
from libs.engine.model.runner import RunnerOptions, choose_kernels
from libs.engine.model_spec.config import ModelConfig, load_config
from libs.engine.model_spec.kv_share import KvShare
from libs.engine.model_spec.plan import plan_batch
from libs.engine.model_spec.rope import Rope
from libs.engine.parallel.commands import PageCommand, PageMove
from libs.engine.parallel.cut import vocabulary_slice
from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.rank_pages import RankPages, part_shape
from libs.engine.parallel.shared_pages import SharedPageMemory
from libs.engine.parallel.sizes import ParallelSizes, RankPlace, even_slice
from libs.engine.parallel.split import count_micro_batches, slice_rows, split_rows, split_sequences
from libs.engine.parallel.stage_loader import StageLoader, StageWeights
from libs.engine.parallel.stage_stack import StagePlan, StageStack
from libs.engine.sampling.prompt_scoring import score_prompts
from libs.engine.step.batch import ForwardBatch
from libs.engine.step.load_progress import LoadProgress
from libs.engine.step.prompt_scores import PromptScores
from slipstream.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The inputs by which a rank loads its part; equal at all ranks, but for `rank`.

    `runner` has no directory of a head or of packed weights, and no progress. `store` and `pages` are
    descriptors of files in memory: where ranks find each other, and the KV pages. `separate_pages`: each rank
    has a memory of its layers and slots, and the file only carries pages to others and from them.
    """

    model_dir: str
    rank: int
    sizes: ParallelSizes
    stage_ends: tuple[int, ...]
    feature_layers: tuple[int, ...]
    cache: CacheShape
    runner: RunnerOptions
    store: int
    pages: int
    separate_pages: bool = False

    @property
    def device(self) -> str:
        return rank_device(self.runner.device, self.rank)

    @property
    def share(self) -> KvShare:
        """The slots of each page that the rank has."""
        return KvShare(self.place.kv_part, self.sizes.kv)

    @property
    def place(self) -> RankPlace:
        return RankPlace(self.rank, self.sizes)

    @property
    def layers(self) -> range:
        stage = self.place.stage
        return range(self.stage_ends[stage - 1] if stage else 0, self.stage_ends[stage])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankOptions:
        raw: dict[str, Any] = json.loads(text)
        raw["runner"] = RunnerOptions(**raw["runner"])
        raw["sizes"], raw["cache"] = ParallelSizes(**raw["sizes"]), CacheShape(**raw["cache"])
        raw["stage_ends"], raw["feature_layers"] = tuple(raw["stage_ends"]), tuple(raw["feature_layers"])
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class RankOutput:
    """logits [R, V] and scores at rank 0, else None; the captured layers [T, H] at the last stage."""

    logits: torch.Tensor | None
    captured: dict[int, torch.Tensor]
    scores: PromptScores | None = None


class RankModel:
    """The part of one rank. One thread drives it; every rank must run the same batches."""

    def __init__(
        self,
        options: RankOptions,
        config: ModelConfig,
        kernels: Kernels,
        weights: StageWeights,
        links: GroupLinks,
        pages: RankPages,
    ) -> None:
        self.options = options
        self.config = config
        self.pages = pages
        self._place = options.place
        self.kernels = kernels
        self._weights = weights
        self._links = links
        self._rope = Rope(config)
        eps = options.runner.latent_norm_eps
        split = None
        if options.sizes.kv > 1:
            assert isinstance(kernels, ShareKernels)  # `check_group` refuses others
            split = kernels
        self._stack = StageStack(
            config=config,
            local=replace(config, n_heads=config.n_heads // options.sizes.tp),
            indices=options.layers,
            first_cached=pages.first_layer,
            layers=weights.layers,
            kernels=kernels,
            latent_norm_eps=config.rms_norm_eps if eps is None else eps,
            links=links,
            split=split,
            output_columns=_output_columns(options.place, config),
        )

    @classmethod
    def load(
        cls,
        options: RankOptions,
        links: GroupLinks,
        memory: SharedPageMemory,
        progress: LoadProgress | None = None,
    ) -> RankModel:
        """Load the rank's part. Raises CheckpointError or InvalidArgument, naming the defect."""
        model_dir = Path(options.model_dir)
        config = load_config(model_dir)
        kernels = choose_kernels(replace(options.runner, device=options.device))
        with Checkpoint(model_dir, progress) as checkpoint:
            loader = StageLoader(
                checkpoint, config, kernels, options.runner.weight_dtype, place=options.place
            )
            weights = loader.load_stage(options.layers)
        if options.runner.kernels == "native":
            torch.set_num_threads(1)
        separate_on = None
        if options.separate_pages:
            _check_room(options)
            separate_on = options.device
        host = PagedLatentCache(options.cache, host=memory)
        pages = RankPages(host, options.layers, options.share, separate_on=separate_on)
        return cls(options, config, kernels, weights, links, pages)

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> RankOutput:
        """Run a batch that `plan_batch` accepts: through the stages in micro-batches, then the logits."""
        captured = self._captured(batch)
        parts = split_rows(batch, count_micro_batches(batch.n_rows, self.options.sizes.pp))
        outputs = [self._run_part(part, captured) for part in parts]
        self._links.finish_sends()
        if not self._place.is_last_stage:
            return RankOutput(None, {})
        x = torch.cat([part_x for part_x, _ in outputs])
        features = {layer: torch.cat([rows[layer] for _, rows in outputs]) for layer in captured}
        place = self.kernels.place
        scores = score_prompts(
            batch, lambda rows: self._logits(x[place(rows)]), vocab_size=self.config.vocab_size
        )
        logits = self._logits(x[place(torch.from_numpy(batch.logit_rows).long())])
        return RankOutput(logits, features, scores)

    def move_pages(self, command: PageCommand) -> None:
        """Copy pages of separate memories; returns when all ranks have done their part."""
        pages = command.pages
        if command.move == PageMove.COPY:
            self.pages.copy(pages)
            return  # later commands of each rank see the copies
        if command.move == PageMove.SCATTER:
            self.pages.scatter(pages)
        elif self._place.head_part == 0:  # ranks of other heads have the same latents
            self.pages.collect(pages)
        self._links.wait_for_all()

    def _run_part(
        self, batch: ForwardBatch, captured: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The residual stream behind this stage, and the outputs of captured layers so far."""
        layers = self._stack.indices
        inherited = [layer for layer in captured if layer < layers.start]
        like = self._weights.layers[0].input_norm
        received = like.new_empty(1 + len(inherited), batch.n_rows, self.config.hidden_size)
        if self._place.is_first_stage:
            received[0] = self._embed(self.kernels.place(torch.from_numpy(batch.token_ids).long()))
        else:
            self._links.receive(received)
        x = received[0]
        outputs = dict(zip(inherited, received[1:], strict=True))
        outputs.update(self._stack.run(x, self._plan(batch), captured))
        if not self._place.is_last_stage:
            self._links.send_on(torch.stack([x, *(outputs[i] for i in captured if i in outputs)]))
        return x, outputs

    def _captured(self, batch: ForwardBatch) -> Sequence[int]:
        """Distinct layers whose outputs are wanted, ascending, so that all stages send them in one order."""
        return sorted(set(self.options.feature_layers)) if batch.want_features else ()

    def _plan(self, batch: ForwardBatch) -> StagePlan:
        rows = split_sequences(batch, self.options.sizes.dp)[self._place.data_part]
        own = slice_rows(batch, rows)
        if own is None:
            return StagePlan(rows, None)
        plan = plan_batch(own, self.config, self._rope, self.pages.host, self.pages.share)
        return StagePlan(rows, self.pages.plan(plan))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each rank of the stage has the rows of a slice of the vocabulary."""
        assert self._weights.embedding is not None
        span = vocabulary_slice(self._place, self.config)
        is_own = (token_ids >= span.start) & (token_ids < span.stop)
        rows = self._weights.embedding[torch.where(is_own, token_ids - span.start, 0)].float()
        return self._links.sum_in_stage(rows.masked_fill_(~is_own.unsqueeze(-1), 0.0))

    def _logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """[R, H] -> [R, V] at rank 0."""
        n_ranks = self.options.sizes.stage_ranks
        spans = [even_slice(self.config.vocab_size, rank, n_ranks) for rank in range(n_ranks)]
        if not len(x):
            return x.new_empty(0, self.config.vocab_size)
        normed = self.kernels.rms_norm(x, self._weights.norm, self.config.rms_norm_eps)  # type: ignore[arg-type]
        part = self.kernels.logits(normed, self._weights.head)
        return self._links.gather_columns(part, [span.stop - span.start for span in spans])


def _check_room(options: RankOptions) -> None:
    """Refuse pages for which the device has no room beside the weights that are there now."""
    free_bytes, limit_bytes = free_device_bytes(options.device), options.runner.memory_bytes
    if free_bytes is None:
        return
    if limit_bytes is not None:
        free_bytes = min(free_bytes, limit_bytes - torch.cuda.memory_allocated(options.device))
    shape = part_shape(options.cache, options.layers, options.share)
    n_bytes = shape.n_pages * shape.page_bytes
    head_bytes = options.runner.head_bytes if options.rank == 0 else 0
    if n_bytes + head_bytes > free_bytes:
        head = f" and a draft head of {head_bytes / 1e9:.3f} GB do" if head_bytes else " does"
        raise FailedPrecondition(
            f"{options.device}, rank {options.rank}: a KV cache of {n_bytes / 1e9:.3f} GB{head} not fit in "
            f"{free_bytes / 1e9:.3f} GB beside the weights (--kv-memory-bytes, --memory-bytes)"
        )


def _output_columns(place: RankPlace, config: ModelConfig) -> slice:
    """The columns of the rank's values that its part of the output projection takes."""
    width = config.n_heads // place.sizes.tp * config.v_head_dim
    return even_slice(width, place.kv_part, place.sizes.kv, unit=config.v_head_dim)
