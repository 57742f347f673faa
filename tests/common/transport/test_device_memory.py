"""Registering CUDA memory: the arguments the engine gets, and refusals with their reasons.

These tests need no device; tests/gpu has those that move bytes of one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from libs.common.checksum import checksum
from libs.common.transport import mooncake
from libs.common.transport.base import KvTransport, ReadOp, Region, TransferRefused
from libs.common.transport.multi_engine import TCP_RAILS
from tests.common.transport.peers import read_with_retries
from tests.common.transport.recording_engine import recorded_calls, run_with_recording_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

REGISTER = """
from types import SimpleNamespace
from libs.common.transport.base import Region, TransferRefused
mooncake.built_with_cuda = lambda: True
device = SimpleNamespace(type="cuda", index=1)
tensor = SimpleNamespace(nbytes=640, device=device, data_ptr=lambda: 7 << 40, is_contiguous=lambda: True)
assert transport.register(tensor) == Region(7 << 40, 640, "cuda:1")
transport.register(Region(8 << 40, 64, "cuda:0"))
host = transport.register(bytearray(4096))
assert host.location == "cpu"
try:
    transport.register(Region(9 << 40, 666, "cuda:0"))
except TransferRefused as error:
    assert "666 bytes of cuda:0: -9" in str(error), error
else:
    raise SystemExit("taken")
"""


@dataclass
class Device:
    type: str
    index: int | None


@dataclass
class DeviceTensor:
    """The attributes of a torch tensor on a CUDA device, with an address that is not mapped."""

    device: Device
    nbytes: int = 4096
    contiguous: bool = True

    def data_ptr(self) -> int:
        return 5 << 40

    def is_contiguous(self) -> bool:
        return self.contiguous


async def test_device_memory_is_registered_with_address_length_and_location(tmp_path: Path) -> None:
    done = await asyncio.to_thread(run_with_recording_engine, tmp_path, "mooncake", then=REGISTER)
    registered: list[Any] = [each["registered"] for each in recorded_calls(done) if "registered" in each]
    assert registered[:TCP_RAILS] == [registered[0]] * TCP_RAILS  # each engine registers it
    registered = [each for number, each in enumerate(registered) if each not in registered[:number]]
    assert registered[:2] == [[7 << 40, 640, "cuda:1"], [8 << 40, 64, "cuda:0"]]
    assert registered[2][1:] == [4096, "*"]  # host memory: the engine finds its NUMA node


async def test_memory_that_the_engine_refused_is_no_destination(
    transport: KvTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = DeviceTensor(Device("cuda", 0))
    with pytest.raises(TransferRefused, match=r"cuda:0") as caught:
        transport.register(refused)
    assert (
        "sockets move memory of the host only" if transport.kind == "socket" else "built with CUDA"
    ) in str(caught.value)
    op = ReadOp(refused.data_ptr(), refused.data_ptr(), 64)
    with pytest.raises(TransferRefused, match="not memory for reads"):
        await transport.read(transport.session_id, [op], timeout_s=5)


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (DeviceTensor(Device("cuda", 0), contiguous=False), "not contiguous"),
        (DeviceTensor(Device("xpu", 0)), "only cpu and cuda:N"),
        (DeviceTensor(Device("meta", None)), "only cpu and cuda:N"),
        (Region(5 << 40, 64, "cuda"), "only cpu and cuda:N"),
        (DeviceTensor(Device("cuda", 0), nbytes=0), "cannot register 0 bytes"),
    ],
)
async def test_memory_that_is_not_contiguous_cpu_or_cuda_is_refused(
    transport: KvTransport, memory: Any, why: str
) -> None:
    with pytest.raises(TransferRefused, match=why):
        transport.register(memory)


async def test_the_installed_engine_reports_that_it_lacks_cuda() -> None:
    """This build takes every address for host memory and would crash on reading a device address."""
    assert not mooncake.built_with_cuda()


async def test_a_host_tensor_is_registered_and_read_like_other_memory(transport: KvTransport) -> None:
    tensor = torch.arange(8192, dtype=torch.int64).to(torch.bfloat16)
    region = transport.register(tensor)
    assert region == Region(tensor.data_ptr(), 16384)
    half = region.n_bytes // 2
    before = checksum(tensor[:4096].view(torch.uint8).numpy().data)
    op = ReadOp(region.address + half, region.address, half)
    await read_with_retries(transport, transport.session_id, [op])
    assert checksum(tensor[4096:].view(torch.uint8).numpy().data) == before
