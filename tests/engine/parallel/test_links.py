"""The links of a rank whose tensors are on a device: what NCCL carries, and what gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from libs.engine.parallel.links import GroupLinks
from libs.engine.parallel.sizes import RankPlace, parse_sizes

META = torch.device("meta")  # a device that has shapes, and no memory


class RecordedCalls:
    """Stands in for torch.distributed: backends of groups, and what is sent over which of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.backend = ""
        self.sent: list[tuple[str, Any]] = []
        patch.setattr(dist, "FileStore", lambda *_: None)
        patch.setattr(dist, "init_process_group", self._init)
        patch.setattr(dist, "new_group", lambda *_, backend=None, **__: backend or self.backend)
        patch.setattr(dist, "barrier", lambda group: self.sent.append(("barrier", group)))
        patch.setattr(dist, "broadcast", lambda x, _, group: self.sent.append((x.device.type, group)))
        patch.setattr(dist, "gather", lambda x, *_, group, **__: self.sent.append((x.device.type, group)))
        patch.setattr(dist, "all_gather", lambda _, x, group: self.sent.append((x.device.type, group)))

    def _init(self, backend: str, **_: Any) -> None:
        self.backend = backend


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RecordedCalls:
    return RecordedCalls(monkeypatch)


def links(rank: int, device: str) -> GroupLinks:
    return GroupLinks(RankPlace(rank, parse_sizes("tp=2")), "/nowhere", device=device)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_commands_of_the_host_go_over_gloo_on_any_device(
    calls: RecordedCalls, device: str, backend: str
) -> None:
    own = links(0, device)
    own.broadcast(torch.zeros(3, dtype=torch.int64))
    own.sum_in_stage(torch.zeros(2, 4))
    assert calls.backend == backend
    assert calls.sent == [("barrier", "gloo"), ("cpu", "gloo"), ("cpu", backend)]


@pytest.mark.parametrize("rank", [0, 1])
def test_gathered_columns_stay_on_the_device_of_the_parts(calls: RecordedCalls, rank: int) -> None:
    part = torch.empty(2, (5, 4)[rank], dtype=torch.bfloat16, device=META)
    gathered = links(rank, "cuda:0").gather_columns(part, [5, 4])
    assert calls.sent[-1] == ("meta", "nccl")
    if rank:
        assert gathered is None
    else:
        assert gathered is not None and gathered.shape == (2, 9)
        assert (gathered.device, gathered.dtype) == (META, torch.bfloat16)


def test_parts_of_bf16_add_up_in_fp32(calls: RecordedCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 + 1 is 256 in bf16, so that the sum of seven small parts would be lost."""

    def gather(parts: list[torch.Tensor], own: torch.Tensor, group: object) -> None:
        assert own.dtype == parts[0].dtype == torch.bfloat16
        for index, part in enumerate(parts):
            part.fill_(1.0 if index else 256.0)

    monkeypatch.setattr(dist, "all_gather", gather)
    own = GroupLinks(RankPlace(0, parse_sizes("tp=8")), "/nowhere", device="cuda:0")
    total = own.sum_in_stage(torch.ones(2, 3, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    assert total.tolist() == [[263.0] * 3] * 2
