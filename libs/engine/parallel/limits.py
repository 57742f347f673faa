"""Which groups of processes the engine does not run, though models allow them. Pure, for planners as well."""

from __future__ import annotations

from libs.engine.kernels.device_name import cuda_index
from libs.engine.parallel.sizes import ParallelSizes, check_kv_split
from slipstream.errors import InvalidArgument

CPU_KERNELS = "native"  # of every worker without a device


def group_refusals(
    sizes: ParallelSizes,
    *,
    device: str,
    kernels: str,
    block_tokens: int,
    decode_steps: str = "plain",
    n_machines: int = 1,
) -> list[InvalidArgument]:
    """Why a worker with these options does not start, the first reason first; empty: it does.

    `kernels` are those for the CPU: a device has Triton's. `n_machines`: over which the ranks would spread.
    """
    if sizes.n_ranks == 1:
        return []
    found = []
    is_cuda = cuda_index(device) is not None
    if has_separate_pages(device) and sizes.dp > 1:
        reason = f"dp={sizes.dp} moves sequences between ranks, whose KV pages are separate on {device}"
        found.append(InvalidArgument("parallel", reason))
    if is_cuda and decode_steps != "plain":
        reason = (
            f"{decode_steps!r} captures steps of one process, not of the {sizes.n_ranks} ranks of {sizes}"
        )
        found.append(InvalidArgument("decode_steps", reason))
    if n_machines > 1:
        found.append(InvalidArgument("parallel", f"ranks run on one machine, not on {n_machines}"))
    try:
        check_kv_split(sizes, block_tokens, "triton" if is_cuda else kernels)
    except InvalidArgument as error:
        found.append(error)
    return found


def check_group(
    sizes: ParallelSizes, *, device: str, kernels: str, block_tokens: int, decode_steps: str = "plain"
) -> None:
    """Raise the first of `group_refusals`."""
    for refusal in group_refusals(
        sizes, device=device, kernels=kernels, block_tokens=block_tokens, decode_steps=decode_steps
    ):
        raise refusal


def has_separate_pages(device: str) -> bool:
    """Whether each rank of a group has a memory of its part of the KV pages: those on devices."""
    return cuda_index(device) is not None
