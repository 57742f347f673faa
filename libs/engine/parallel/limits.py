"""Which groups of processes the engine does not run, though models allow them. Pure, for planners as well."""

from __future__ import annotations

from libs.engine.kernels.device_name import cuda_index
from libs.engine.parallel.sizes import ParallelSizes, check_kv_split
from slipstream.errors import InvalidArgument


def group_refusals(
    sizes: ParallelSizes, *, device: str, kernels: str, block_tokens: int, n_machines: int = 1
) -> list[InvalidArgument]:
    """Why a worker with these options does not start, the first reason first; empty: it does.

    `kernels` are those for the CPU: a device has Triton's. `n_machines`: over which the ranks would spread.
    """
    if sizes.n_ranks == 1:
        return []
    found = []
    is_cuda = cuda_index(device) is not None
    if is_cuda:
        reason = f"a model cut over processes runs on the cpu, not on {device}"
        found.append(InvalidArgument("device", reason))
    if n_machines > 1:
        found.append(InvalidArgument("parallel", f"ranks run on one machine, not on {n_machines}"))
    try:
        check_kv_split(sizes, block_tokens, "triton" if is_cuda else kernels)
    except InvalidArgument as error:
        found.append(error)
    return found


def check_group(sizes: ParallelSizes, *, device: str, kernels: str, block_tokens: int) -> None:
    """Raise the first of `group_refusals`."""
    for refusal in group_refusals(sizes, device=device, kernels=kernels, block_tokens=block_tokens):
        raise refusal
