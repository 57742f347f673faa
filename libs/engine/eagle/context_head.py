"""What a head over contexts has, whatever its arithmetic."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from libs.engine.eagle.attended import pads_contexts
from libs.engine.eagle.attention import ProjectedRows
from libs.engine.eagle.context import DraftContext, HeadInputs
from libs.engine.eagle.head_rows import PADDED_CONTEXTS, KvShape
from libs.engine.kernels.interface import Kernels


class HeadSize(Protocol):
    """What rows must fit, from a head's configuration."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_shape(self) -> KvShape: ...


class ContextHead(ABC):
    """A head over contexts of keys and values: a chain (EAGLE-3), or a block in one pass (DFlash).

    It has no state: `drafter.py` keeps the contexts. `digest`: hex, over the head's files.
    """

    config: HeadSize

    def __init__(self, kernels: Kernels, digest: str) -> None:
        self.digest = digest
        self.pads_contexts = pads_contexts(kernels)  # `draft` reads rows that are not valid, too
        self._kernels = kernels

    @property
    def device(self) -> torch.device:
        """Where the head computes, and where its inputs and contexts are."""
        return self._kernels.device

    @property
    def most_contexts(self) -> int:
        """How many contexts one call of `draft` takes."""
        return PADDED_CONTEXTS if self.pads_contexts else sys.maxsize

    @abstractmethod
    def project_rows(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[HeadInputs | None, ProjectedRows]:
        """Keys and values of rows for their context, and what `draft` needs of the newest ones."""

    @abstractmethod
    def draft(
        self, contexts: Sequence[DraftContext], n_drafts: int, min_confidence: float
    ) -> list[list[int]]:
        """Drafts of each context; see `DrafterEngine.propose_batch`."""
