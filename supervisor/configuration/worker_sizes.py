"""What prefill and decode workers may take of the machine's memory and of its devices."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libs.engine.kernels.device_name import cuda_index
from slipstream.errors import InvalidArgument

_WORKERS_SHARE = 0.75  # of the host; the other processes have the rest


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a prefill or decode worker runs, and its --memory-bytes; 0: what is free there.

    Each rank has the device behind that of the rank before. A worker may take its bytes of each of them.
    """

    device: str
    n_ranks: int = 1
    memory_bytes: int = 0

    @property
    def devices(self) -> range:
        """The CUDA devices of the ranks; empty on the CPU."""
        first = cuda_index(self.device)
        return range(0) if first is None else range(first, first + self.n_ranks)


def has_cuda_driver() -> bool:
    """Whether NVIDIA's driver loads here. A machine with it may lack a device, which the workers say."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_driver(devices: Mapping[str, str], *, has_driver: bool) -> None:
    """Raises InvalidArgument for a CUDA device, by the flag or key that states it, without a driver."""
    for source, device in devices.items():
        if cuda_index(device) is not None and not has_driver:
            reason = f"{device} is not here: NVIDIA's driver, libcuda.so.1, does not load"
            raise InvalidArgument(source, reason)


def check_devices(workers: Sequence[WorkerPlace], drafters: Sequence[str] = ()) -> None:
    """Raises InvalidArgument if workers share a device and it is open what each may take of it.

    `drafters`: their devices; a drafter takes what its head and contexts need.
    """
    beside = Counter(map(cuda_index, drafters))
    for shared in sorted({index for worker in workers for index in worker.devices}):
        there = [worker for worker in workers if shared in worker.devices]
        is_shared = len(there) + beside[shared] > 1
        if is_shared and not all(worker.memory_bytes for worker in there):
            raise InvalidArgument("--memory-bytes", _sharing(shared, there, beside[shared]))


def _sharing(shared: int, workers: Sequence[WorkerPlace], n_drafters: int) -> str:
    drafters = f" and {n_drafters} drafters" if n_drafters else ""
    spans = sorted({(found.start, found.stop - 1) for w in workers if len(found := w.devices) > 1})
    groups = ", ".join(f"cuda:{first} to cuda:{last}" for first, last in spans)
    ranks = f", as ranks of --parallel take {groups}" if groups else ""
    return (
        f"{len(workers)} prefill and decode workers{drafters} share cuda:{shared}{ranks}: state what each "
        "worker may take of it"
    )


def check_memory(workers_bytes: Sequence[int], limit_bytes: int) -> None:
    """Raises InvalidArgument if the workers may together take more than the machine has."""
    sized = [n_bytes for n_bytes in workers_bytes if n_bytes]
    missing = sum(sized) - limit_bytes
    if missing > 0:
        sizes = " or ".join(f"{n_bytes / 1e9:.1f}" for n_bytes in sorted(set(sized)))
        raise InvalidArgument(
            "--memory-bytes",
            f"{len(sized)} prefill and decode workers of {sizes} GB do not fit in the "
            f"{limit_bytes / 1e9:.1f} GB of this machine: {missing / 1e9:.1f} GB are missing",
        )
    share_of_unstated(workers_bytes, limit_bytes)


def share_of_unstated(workers_bytes: Sequence[int], limit_bytes: int) -> int:
    """What each worker of size 0 gets: an equal part of what the other sizes leave of three quarters.

    The last quarter is for the other processes. The result is 0 where every worker has a size.
    Raises InvalidArgument if nothing is left.
    """
    unstated = sum(not n_bytes for n_bytes in workers_bytes)
    if not unstated:
        return 0
    for_workers = int(limit_bytes * _WORKERS_SHARE)
    share = (for_workers - sum(workers_bytes)) // unstated
    if share <= 0:
        raise InvalidArgument(
            "--memory-bytes",
            f"{unstated} prefill and decode workers have no memory_bytes, and the others take "
            f"{sum(workers_bytes) / 1e9:.1f} GB of {for_workers / 1e9:.1f} GB, three quarters of this "
            "machine: state the bytes of both tiers, or fewer of one",
        )
    return share
