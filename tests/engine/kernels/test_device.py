"""The choice of a device: refused with a reason where the machine lacks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.kernels import device as device_module
from libs.engine.kernels.device import (
    free_device_bytes,
    host_buffer,
    open_device,
    open_triton_kernels,
    wait_for_device,
)
from libs.engine.parallel.sizes import parse_sizes
from slipstream.errors import FailedPrecondition, InvalidArgument
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cuda:1000", ""])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not cpu, cuda or cuda:N"):
        open_device(name)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_an_engine_for_a_missing_device_is_refused(tmp_path: Path, name: str) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    with pytest.raises(FailedPrecondition, match=f"device {name}: no CUDA device here"):
        build_engine(tmp_path, EngineOptions(device=name))


def test_an_index_beyond_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert open_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(FailedPrecondition, match="this machine has 2 CUDA devices"):
        open_device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_a_model_cut_over_devices_needs_them(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    with pytest.raises(FailedPrecondition, match="no CUDA device here"):
        build_engine(tmp_path, EngineOptions(device="cuda", parallel=parse_sizes("tp=2")))


def test_triton_on_the_cpu_is_for_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device_module, "is_triton_installed", lambda: True)
    with pytest.raises(FailedPrecondition, match="TRITON_INTERPRET=1"):
        open_triton_kernels(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(device_module, "is_triton_installed", lambda: False)
    with pytest.raises(FailedPrecondition, match=r"slipstream-server\[gpu\]"):
        open_triton_kernels(torch.device("cuda"), torch.float32)


def test_the_thread_that_opens_kernels_launches_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on a thread's current device, which is cuda:0 at first."""
    pytest.importorskip("triton")
    current: list[torch.device] = []
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert open_triton_kernels(torch.device("cuda", 3), torch.bfloat16).device.index == 3
    assert current == [torch.device("cuda", 3)]


def test_a_wait_is_one_for_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait_for_device(torch.device("cpu"))
    assert not waited
    wait_for_device(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank asks once its weights are there, and the copies that the load made are kept by torch."""
    free = {"bytes": 100, "kept": 40}

    def empty_cache() -> None:
        free["bytes"], free["kept"] = free["bytes"] + free["kept"], 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["bytes"], 1000))
    assert free_device_bytes("cuda:1") == 140
    assert free_device_bytes("cpu") is None


@pytest.mark.parametrize(
    ("device", "has_room", "pins"), [("cpu", True, 0), ("cuda", True, 1), ("cuda", False, 1)]
)
def test_host_memory_is_pinned_for_cuda_if_there_is_some(
    monkeypatch: pytest.MonkeyPatch, device: str, has_room: bool, pins: int
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def allocate(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and not has_room:
            raise RuntimeError("CUDA error: out of memory")
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    found = host_buffer((2, 3), torch.bfloat16, torch.device(device))
    assert (found.shape, found.dtype, found.device.type) == ((2, 3), torch.bfloat16, "cpu")
    assert asked.count(True) == pins and asked[-1] is (pins == 1 and has_room)
