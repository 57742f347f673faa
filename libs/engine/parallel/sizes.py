"""How a model is cut over the ranks of a group, and which part of it each rank holds. Pure."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from libs.common.worker_bounds import MAX_PARALLEL_RANKS
from libs.engine.model_spec.config import ModelConfig
from slipstream.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Sizes of the five kinds of parallelism; tp x kv x dp ranks form a stage, pp stages form a group.

    tp  ranks that share the heads of attention
    pp  stages of consecutive layers
    ep  parts of a stage that hold different experts; ranks of one part share each of its experts
    dp  parts of a stage that compute attention for different sequences
    kv  ranks that share the positions of each context; each has the same heads
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    kv: int = 1

    @property
    def attention_ranks(self) -> int:
        """Ranks that compute attention for the same sequences."""
        return self.tp * self.kv

    @property
    def stage_ranks(self) -> int:
        return self.attention_ranks * self.dp

    @property
    def n_ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def expert_ranks(self) -> int:
        """Ranks that share one expert."""
        return self.stage_ranks // self.ep

    def __str__(self) -> str:
        return ",".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def parse_sizes(text: str, field: str = "parallel") -> ParallelSizes:
    """Parse "tp=2,pp=2"; sizes that it lacks are 1. Raises InvalidArgument naming `field`."""
    names = [known.name for known in fields(ParallelSizes)]
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if name not in names or name in found or not (size.isascii() and size.isdigit()) or len(size) > 4:
            raise InvalidArgument(field, f"{part!r} is not one of {', '.join(f'{n}=N' for n in names)}, once")
        found[name] = int(size)
    sizes = ParallelSizes(**found)
    if min(astuple(sizes)) < 1:
        raise InvalidArgument(field, "every size is at least 1")
    if sizes.n_ranks > MAX_PARALLEL_RANKS:
        raise InvalidArgument(field, f"{sizes.n_ranks} ranks are more than {MAX_PARALLEL_RANKS}")
    if sizes.stage_ranks % sizes.ep:
        raise InvalidArgument(
            field, f"ep={sizes.ep} does not divide the {sizes.stage_ranks} ranks of a stage"
        )
    return sizes


def check_sizes(sizes: ParallelSizes, config: ModelConfig, field: str = "parallel") -> None:
    """Raise InvalidArgument when a model of `config` cannot be cut in this way."""
    if config.n_heads % sizes.tp:
        raise InvalidArgument(field, f"tp={sizes.tp} does not divide the model's {config.n_heads} heads")
    if sizes.pp > config.n_layers:
        raise InvalidArgument(field, f"pp={sizes.pp} is more than the model's {config.n_layers} layers")
    if sizes.ep > config.n_routed_experts:
        raise InvalidArgument(
            field, f"ep={sizes.ep} is more than the model's {config.n_routed_experts} experts"
        )
    narrowest = {
        "intermediate_size": (config.dense_intermediate_size, sizes.stage_ranks),
        "moe_intermediate_size": (config.moe_intermediate_size, sizes.expert_ranks),
        "vocab_size": (config.vocab_size, sizes.stage_ranks),
        "num_attention_heads x v_head_dim": (config.n_heads * config.v_head_dim, sizes.attention_ranks),
    }
    if config.n_shared_experts:
        shared = config.moe_intermediate_size * config.n_shared_experts
        narrowest["moe_intermediate_size x n_shared_experts"] = (shared, sizes.stage_ranks)
    for key, (width, parts) in narrowest.items():
        if width < parts:
            raise InvalidArgument(field, f"the model's {key} {width} cannot be cut in {parts}")


def check_kv_split(sizes: ParallelSizes, block_tokens: int, kernels: str, field: str = "parallel") -> None:
    """Raise InvalidArgument when pages or `kernels` do not allow the split of KV."""
    if block_tokens % sizes.kv:
        raise InvalidArgument(field, f"kv={sizes.kv} does not divide the {block_tokens} tokens of a KV page")
    if sizes.kv > 1 and kernels == "triton":
        raise InvalidArgument(field, f"kv={sizes.kv}: the {kernels} kernels do not split KV by position")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank in its group. Rank 0 is in the last stage, whose logits it samples from."""

    rank: int
    sizes: ParallelSizes

    @property
    def stage(self) -> int:
        """0 for the stage with the embedding."""
        return self.sizes.pp - 1 - self.rank // self.sizes.stage_ranks

    @property
    def index(self) -> int:
        """The rank's number in its stage."""
        return self.rank % self.sizes.stage_ranks

    @property
    def head_part(self) -> int:
        return self.index % self.sizes.tp

    @property
    def kv_part(self) -> int:
        return self.index // self.sizes.tp % self.sizes.kv

    @property
    def output_part(self) -> int:
        """The rank's part of attention's output projection, which those of the same sequences share."""
        return self.head_part * self.sizes.kv + self.kv_part

    @property
    def data_part(self) -> int:
        return self.index // self.sizes.attention_ranks

    @property
    def expert_part(self) -> int:
        return self.index // self.sizes.expert_ranks

    @property
    def inner_part(self) -> int:
        """The rank's share of each expert that it holds."""
        return self.index % self.sizes.expert_ranks

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.sizes.pp - 1

    def stage_members(self) -> list[int]:
        """The ranks of this stage, by index."""
        first = self.rank - self.index
        return list(range(first, first + self.sizes.stage_ranks))

    def kv_members(self) -> list[int]:
        """The ranks with the same heads and sequences, by their part of the positions."""
        first = self.rank - self.kv_part * self.sizes.tp
        return list(range(first, first + self.sizes.attention_ranks, self.sizes.tp))

    @property
    def previous_rank(self) -> int:
        """The rank of the stage before with the same index."""
        return self.rank + self.sizes.stage_ranks

    @property
    def next_rank(self) -> int:
        return self.rank - self.sizes.stage_ranks


def even_slice(total: int, part: int, parts: int, *, unit: int = 1) -> slice:
    """Part `part` of `parts` of [0, total), cut at multiples of `unit`; sizes differ by one unit at most.

    A total that has fewer units than parts is cut anywhere.
    """
    if total // unit < parts:
        unit = 1
    units = -(-total // unit)
    begin, end = (units * edge // parts * unit for edge in (part, part + 1))
    return slice(min(begin, total), min(end, total))
