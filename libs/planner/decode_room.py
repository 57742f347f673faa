"""Memory of cards that decode workers take beside weights and KV: steps as graphs, and a draft head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libs.common.worker_bounds import MAX_CONFIG_BYTES
from libs.engine.eagle.head_memory import (
    DRAFTER_CONTEXTS,
    HeadMemory,
    head_memory,
    local_contexts,
    parse_draft_config,
)
from libs.engine.graphs.buckets import BucketLimits
from libs.engine.graphs.step_memory import estimate_step_memory
from libs.engine.model_spec.config_json import read_json_object
from libs.engine.step.draft_head import MAX_DRAFT_TOKENS
from libs.planner.shapes.model_shape import ModelShape
from slipstream.errors import InvalidArgument

_PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DecodeStepRoom:
    """Room for steps of so many sequences and drafts at most. Where there are drafts, there are features."""

    max_batch: int
    max_draft_tokens: int = MAX_DRAFT_TOKENS
    has_features: bool = True
    block_tokens: int = _PAGE_TOKENS

    def n_bytes(self, model: ModelShape, max_context_tokens: int | None = None) -> int:
        """An estimate: see `estimate_step_memory`."""
        context_tokens = min(max_context_tokens or model.max_context_tokens, model.max_context_tokens)
        return estimate_step_memory(
            BucketLimits(self.max_batch, self.max_draft_tokens + 1, self.has_features),
            vocab_size=model.vocab_size,
            feature_width=model.hidden_size if self.has_features else 0,
            n_blocks=-(-context_tokens // self.block_tokens),
        ).n_bytes


@dataclass(frozen=True, slots=True)
class DraftHeadRoom:
    """Room of a head's parts, of which the card of rank 0 has all that a decode worker holds.

    is_local   the head runs in the decode worker; else in a drafter, on another device or the host
    max_batch  of the decode worker, by which a local head holds contexts
    """

    name: str
    memory: HeadMemory
    is_local: bool
    max_batch: int

    @property
    def contexts(self) -> int:
        """Contexts that the head holds where it runs."""
        return local_contexts(self.max_batch) if self.is_local else DRAFTER_CONTEXTS

    @property
    def head_bytes(self) -> int:
        """The memory of the head with its contexts, in the decode worker or in a drafter."""
        return self.memory.n_bytes(self.contexts)

    @property
    def local_bytes(self) -> int:
        """The part of `head_bytes` on the decode worker's card: all of a local head, and none of another."""
        return self.head_bytes if self.is_local else 0

    @property
    def card_bytes(self) -> int:
        """The memory on the decode worker's card: the projection to features, and a local head."""
        return self.memory.feature_bytes + self.local_bytes


def read_draft_head(path: Path, model: ModelShape, *, is_local: bool, max_batch: int) -> DraftHeadRoom:
    """`path`: a config.json of a head, or the directory of its checkpoint.

    Raises InvalidArgument that names the option, and the key of the file.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = read_json_object(file, "--draft-model", MAX_CONFIG_BYTES)
    try:
        config = parse_draft_config(raw)
    except InvalidArgument as error:  # the model has a config.json, too
        raise InvalidArgument("--draft-model", f"{file}: {error.message}") from None
    theirs, ours = (config.hidden_size, config.vocab_size), (model.hidden_size, model.vocab_size)
    if theirs != ours:
        raise InvalidArgument(
            "--draft-model",
            f"hidden and vocabulary size {theirs[0]}, {theirs[1]} are not the model's {ours[0]}, {ours[1]}",
        )
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return DraftHeadRoom(name, head_memory(config), is_local, max_batch)
