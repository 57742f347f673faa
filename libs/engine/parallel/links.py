"""The connections of one rank: the command stream, the ranks of its stage, and the stages beside it.

NCCL connects CUDA devices, gloo everything else. Commands are in the host, so that gloo carries them on any
device. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from libs.engine.parallel.sizes import RankPlace

# A rank may wait for its next command for as long as the worker has no request. Dead ranks close connections,
# which ends all waits but one: gloo forgets a send that it begins before its thread has read the close. Then
# `FollowerProcesses` ends the worker.
_IDLE_LIMIT = timedelta(days=365)


class GroupLinks:
    """Collectives of one rank. One thread makes all calls."""

    def __init__(self, place: RankPlace, store: str, *, device: str = "cpu") -> None:
        """Connects with the other ranks, all of which are there on return.

        `store`: a file, empty at first, that must stay for as long as this object. `device`: where the
        tensors of this rank are, but for those of `broadcast`.
        """
        for library in ("GLOO", "NCCL"):  # all ranks are on this machine
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        backend = "nccl" if device.startswith("cuda") else "gloo"
        sizes = place.sizes
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, sizes.n_ranks),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=sizes.n_ranks,
            timeout=_IDLE_LIMIT,
        )
        self.place = place
        places = [RankPlace(rank, sizes) for rank in range(sizes.n_ranks)]
        self._stage = self._join([place.stage_members() for place in places])
        self._kv = self._join([place.kv_members() for place in places]) if sizes.kv > 1 else None
        self._commands: Any = dist.new_group(backend="gloo", timeout=_IDLE_LIMIT)
        # Gloo reads the store no more after this. NCCL does, at the first tensor of each group.
        dist.barrier(group=self._commands)
        self._sends: list[tuple[Any, torch.Tensor]] = []

    def _join(self, groups: Iterable[list[int]]) -> Any:
        """Make each distinct group, as every rank must, in one order; return this rank's."""
        own = None
        for members in dict.fromkeys(map(tuple, groups)):
            group = dist.new_group(list(members), timeout=_IDLE_LIMIT)
            if self.place.rank in members:
                own = group
        return own

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's `values` of the host, in place, at all ranks."""
        dist.broadcast(values, 0, group=self._commands)

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        dist.barrier(group=self._commands)

    def sum_in_stage(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the stage's parts, bit for bit the same at all of its ranks and for any number of rows.

        Parts of bf16 travel as they are, and add up in fp32.

        An all-reduce adds in an order that depends on an element's place in the buffer. Then a row's value
        would depend on the rows beside it, and drafts would change tokens.
        """
        n_ranks = self.place.sizes.stage_ranks
        if n_ranks == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(n_ranks)]
        dist.all_gather(parts, part.contiguous(), group=self._stage)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total

    def gather_shares(self, share: torch.Tensor) -> list[torch.Tensor]:
        """The values of all ranks with the same heads and sequences, by their part of the positions."""
        shares = [torch.empty_like(share) for _ in range(self.place.sizes.kv)]
        dist.all_gather(shares, share, group=self._kv)
        return shares

    def gather_columns(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """The stage's columns [R, w] side by side at rank 0; None at other ranks. For the last stage only."""
        if len(widths) == 1:
            return part
        padded = part.new_zeros(part.shape[0], max(widths))
        padded[:, : part.shape[1]] = part
        if self.place.rank:
            dist.gather(padded, None, dst=0, group=self._stage)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0, group=self._stage)
        return torch.cat([p[:, :width] for p, width in zip(parts, widths, strict=True)], dim=1)

    def send_on(self, x: torch.Tensor) -> None:
        """Start to send to the next stage; `x` must not change until `finish_sends`."""
        self._sends.append((dist.isend(x, self.place.next_rank), x))

    def receive(self, x: torch.Tensor) -> None:
        """Fill x from the stage before."""
        dist.recv(x, self.place.previous_rank)

    def finish_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def close(self) -> None:
        """End all groups. On return nothing reads the store's file."""
        dist.destroy_process_group()
        # The end of a FileStore reads its file again. Its path may name another file by then.
        self._stage = self._kv = self._commands = None
        self._sends.clear()
        gc.collect()
