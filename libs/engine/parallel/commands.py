"""The command stream from rank 0 to the other ranks: each command is a header and a payload of integers.

A command is a batch, or copies of pages between the memories of ranks and the host's.

Ranks run the same commands in the same order, so that their collectives match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from libs.engine.parallel.links import GroupLinks
from libs.engine.step.batch import ForwardBatch

_END, _STEP = 0, 1


class PageMove(IntEnum):
    """What ranks do with pages: see the methods of `RankPages`. The values are kinds of commands."""

    COPY = 2
    COLLECT = 3
    SCATTER = 4


@dataclass(frozen=True, slots=True)
class PageCommand:
    """`pages` of a copy alternates sources and targets."""

    move: PageMove
    pages: Sequence[int]


# Without `scored_top`: only rank 0 has logits to score.
_ARRAYS = tuple(
    field.name for field in fields(ForwardBatch) if field.name not in ("want_features", "scored_top")
)
_HEADER_WORDS = 3 + len(_ARRAYS)  # kind, want_features, columns of the page table, then the arrays' sizes


def send_step(links: GroupLinks, batch: ForwardBatch) -> None:
    """Rank 0 only: let all other ranks run `batch`."""
    arrays = [np.ascontiguousarray(getattr(batch, name), dtype=np.int32) for name in _ARRAYS]
    header = [_STEP, int(batch.want_features), batch.page_table.shape[1], *(a.size for a in arrays)]
    links.broadcast(torch.tensor(header))
    links.broadcast(torch.from_numpy(np.concatenate([a.ravel() for a in arrays])))


def send_pages(links: GroupLinks, command: PageCommand) -> None:
    """Rank 0 only: let all other ranks move pages."""
    header = [int(command.move), len(command.pages)]
    links.broadcast(torch.tensor(header + [0] * (_HEADER_WORDS - len(header))))
    links.broadcast(torch.tensor(command.pages, dtype=torch.int32))


def send_end(links: GroupLinks) -> None:
    """Rank 0 only: end the stream."""
    links.broadcast(torch.tensor([_END] * _HEADER_WORDS))


def receive(links: GroupLinks) -> ForwardBatch | PageCommand | None:
    """Wait for the next command; None at the end of the stream."""
    header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
    links.broadcast(header)
    kind, *rest = header.tolist()
    if kind == _END:
        return None
    if kind != _STEP:
        pages = torch.empty(rest[0], dtype=torch.int32)
        links.broadcast(pages)
        return PageCommand(PageMove(kind), pages.tolist())
    want_features, n_columns, *sizes = rest
    payload = torch.empty(sum(sizes), dtype=torch.int32)
    links.broadcast(payload)
    parts = np.split(payload.numpy(), np.cumsum(sizes)[:-1])
    arrays: dict[str, Any] = dict(zip(_ARRAYS, parts, strict=True))
    arrays["page_table"] = arrays["page_table"].reshape(-1, n_columns)
    return ForwardBatch(**arrays, want_features=bool(want_features))
