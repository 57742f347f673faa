"""Check the RDMA devices before Mooncake's engine starts.

With rdma requested and no usable device, the engine (0.3.13.post1) silently listens over TCP, where peers
over RDMA cannot reach it. This module finds each cause of that and names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.errors import FailedPrecondition

SYS_DEVICES = Path("/sys/class/infiniband")
CHARACTER_DEVICES = Path("/dev/infiniband")
# If one of these is set, the engine uses TCP even when rdma was requested.
FORCING_TCP = ("MC_FORCE_TCP",)
_INSTEAD = "--transport mooncake moves KV over TCP"


def usable_devices(
    asked: Sequence[str],
    environment: Mapping[str, str],
    *,
    sys_devices: Path | None = None,
    character_devices: Path | None = None,
) -> tuple[str, ...]:
    """The devices for the engine: the `asked` ones, or all usable ones; empty if all devices are usable.

    Raises FailedPrecondition when an asked device is missing, has no active port or cannot be opened, and
    when no device is usable.
    """
    sys_devices = sys_devices or SYS_DEVICES
    for name in FORCING_TCP:
        if environment.get(name):
            raise FailedPrecondition(f"{name} is set, so Mooncake would use TCP instead of rdma: unset it")
    there = sorted(path.name for path in sys_devices.iterdir()) if sys_devices.is_dir() else []
    if not there:
        raise FailedPrecondition(
            f"rdma: no RDMA device: {sys_devices} is empty, is the driver loaded? {_INSTEAD}"
        )
    missing = [device for device in asked if device not in there]
    if missing:
        raise FailedPrecondition(f"rdma: no device {', '.join(missing)} here; there are: {', '.join(there)}")
    problems = {
        device: problem
        for device in asked or there
        if (problem := _problem(sys_devices / device, character_devices or CHARACTER_DEVICES))
    }
    usable = tuple(device for device in asked or there if device not in problems)
    if problems and (asked or not usable):
        listed = "; ".join(f"{device} {problem}" for device, problem in problems.items())
        raise FailedPrecondition(f"rdma: {listed}; {_INSTEAD}")
    return usable if asked or problems else ()


def _problem(device: Path, character_devices: Path) -> str:
    """Why the engine cannot use the device; empty if no problem was found."""
    states = [_text(port / "state") for port in sorted((device / "ports").glob("*"))]
    if not any("ACTIVE" in state for state in states):
        return f"has no active port ({', '.join(states) or 'no port'})"
    verbs = sorted(path.name for path in (device / "device" / "infiniband_verbs").glob("uverbs*"))
    if not verbs:
        return "has no verbs device (is ib_uverbs loaded?)"
    closed = [name for name in verbs if not os.access(character_devices / name, os.R_OK | os.W_OK)]
    if closed:
        return f"cannot be opened ({character_devices / closed[0]}: give the container access to it)"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
