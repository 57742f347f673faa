"""What prefill and decode workers may take of the machine's memory and of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from libs.engine.kernels.device_name import cuda_index
from slipstream.errors import InvalidArgument

_WORKERS_SHARE = 0.75  # of the host; the other processes have the rest


def check_devices(workers: Sequence[tuple[str, int]], drafters: Sequence[str] = ()) -> None:
    """Raises InvalidArgument if workers share a device and it is open what each may take of it.

    workers   device and --memory-bytes of each prefill and decode worker; 0: what is free on the device
    drafters  their devices; a drafter takes what its head and contexts need
    """
    indices = [(cuda_index(device), n_bytes) for device, n_bytes in workers]
    beside = Counter(map(cuda_index, drafters))
    for shared, count in Counter(index for index, _ in indices if index is not None).items():
        is_shared = count + beside[shared] > 1
        if is_shared and not all(n_bytes for index, n_bytes in indices if index == shared):
            others = f" and {beside[shared]} drafters" if beside[shared] else ""
            raise InvalidArgument(
                "--memory-bytes",
                f"{count} prefill and decode workers{others} share cuda:{shared}: state what each worker may "
                "take of it",
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
