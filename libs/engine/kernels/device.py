"""The device that an engine computes on, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from libs.engine.kernels.device_name import cuda_index
from slipstream.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from libs.engine.kernels.gpu.triton_kernels import TritonKernels

log = logging.getLogger(__name__)


def open_device(name: str) -> torch.device:
    """The device `cpu`, `cuda` or `cuda:N`.

    Raises InvalidArgument for another name, and FailedPrecondition when this machine lacks the device.
    """
    try:
        index = cuda_index(name)
    except ValueError as error:
        raise InvalidArgument("device", str(error)) from None
    if index is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise FailedPrecondition(f"device {name}: no CUDA device here (torch {torch.__version__}, {built})")
    n_devices = torch.cuda.device_count()
    if index >= n_devices:
        raise FailedPrecondition(f"device {name}: this machine has {n_devices} CUDA devices")
    return torch.device("cuda", index)


def free_device_bytes(name: str) -> int | None:
    """Memory that is free on a CUDA device; None for the CPU. Raises as `open_device` does.

    What this process has freed counts: torch keeps it. The call leaves a context on the device, so a rank
    asks of its device alone.
    """
    device = open_device(name)
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def host_buffer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory in the host for copies of a device's tensors: pinned for CUDA, if the system has some."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            log.warning("copies of %s pass through pageable memory: %s", device, error)
    return torch.empty(shape, dtype=dtype)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host's tensor on the device, for which the host does not wait; on a CPU the tensor."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def wait_for_device(device: torch.device) -> None:
    """Wait for all that was launched; a CPU has nothing in flight. Raises what the device raises."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_triton_kernels(device: torch.device, dtype: torch.dtype) -> TritonKernels:
    """Kernels for a CUDA device; on the CPU only in Triton's interpreter, which is for tests.

    Triton launches on the current device of a thread, so `device` becomes that of the calling thread.
    """
    if not is_triton_installed():
        raise FailedPrecondition(
            "kernels for a CUDA device need Triton: pip install 'slipstream-server[gpu]'"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise FailedPrecondition("Triton kernels run on the CPU only with TRITON_INTERPRET=1, for tests")
    from libs.engine.kernels.gpu.triton_kernels import TritonKernels

    if device.type == "cuda":
        torch.cuda.set_device(device)
    return TritonKernels(device, dtype)


def is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
