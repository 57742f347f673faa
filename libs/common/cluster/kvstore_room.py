"""The room of a kvstore node without a block, counted in blocks. Pure.

A node learns the size of a block with the first one, and reports no room until then. Its record states its
memory, and the records of workers state the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from libs.common.cluster.worker_record import Role, Worker

# Blocks begin at a page of memory each.
_PAGE_BYTES = 4096


def blocks_for(dram_bytes: int, block_bytes: int) -> int:
    """How many blocks of that size the memory holds; 0 where either is unknown."""
    if block_bytes <= 0:
        return 0
    return max(dram_bytes, 0) // (-(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES)


def kvstore_rooms(workers: Iterable[Worker]) -> Mapping[str, int]:
    """The blocks that the memory of each kvstore node holds, by instance.

    Workers of two sizes serve two models: the larger size counts, so that no room is shown that one of them
    lacks.
    """
    fleet = list(workers)
    block_bytes = max((worker.capacity.get("block_bytes", 0) for worker in fleet), default=0)
    return {
        worker.instance: blocks_for(worker.capacity.get("dram_bytes", 0), block_bytes)
        for worker in fleet
        if worker.role is Role.KVSTORE
    }
