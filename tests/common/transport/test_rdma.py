"""The RDMA devices that the engine gets, and the errors for unusable ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from libs.common.transport.rdma import usable_devices
from slipstream.errors import FailedPrecondition
from tests.common.transport.recording_engine import make_device


def devices(root: Path, *asked: str) -> tuple[str, ...]:
    return usable_devices(asked, {}, sys_devices=root / "sys", character_devices=root / "dev")


def test_requested_devices_keep_their_order_and_none_means_all(tmp_path: Path) -> None:
    for number in range(3):
        make_device(tmp_path, f"mlx5_{number}", verbs=f"uverbs{number}")
    assert devices(tmp_path, "mlx5_2", "mlx5_0") == ("mlx5_2", "mlx5_0")
    assert devices(tmp_path) == ()


def test_unusable_devices_are_left_out_without_a_filter(tmp_path: Path) -> None:
    make_device(tmp_path, "good", verbs="uverbs0")
    make_device(tmp_path, "unplugged", state="1: DOWN", verbs="uverbs1")
    make_device(tmp_path, "closed", verbs="uverbs2")
    (tmp_path / "dev" / "uverbs2").unlink()
    assert devices(tmp_path) == ("good",)


@pytest.mark.parametrize(
    ("broken", "asked", "why"),
    [
        ({"state": "1: DOWN"}, ["mlx5_0"], r"mlx5_0 has no active port \(1: DOWN\)"),
        ({"state": "1: DOWN"}, [], "mlx5_0 has no active port"),
        ({"verbs": ""}, ["mlx5_0"], "mlx5_0 has no verbs device"),
        ({}, ["mlx5_9"], "no device mlx5_9 here; there are: mlx5_0"),
    ],
)
def test_an_unusable_requested_device_is_refused_with_the_reason(
    tmp_path: Path, broken: dict[str, str], asked: Sequence[str], why: str
) -> None:
    make_device(tmp_path, "mlx5_0", **broken)
    with pytest.raises(FailedPrecondition, match=why):
        devices(tmp_path, *asked)


def test_a_missing_character_device_is_named_in_the_error(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0")
    (tmp_path / "dev" / "uverbs0").unlink()
    with pytest.raises(FailedPrecondition, match=r"uverbs0: give the container access.*--transport mooncake"):
        devices(tmp_path, "mlx5_0")


def test_a_host_without_devices_gets_an_error_that_names_the_tcp_transport(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"no RDMA device.*--transport mooncake moves KV over TCP"):
        devices(tmp_path)


def test_an_environment_that_forces_tcp_is_refused(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0")
    with pytest.raises(FailedPrecondition, match="MC_FORCE_TCP is set"):
        usable_devices([], {"MC_FORCE_TCP": "1"}, sys_devices=tmp_path / "sys")
