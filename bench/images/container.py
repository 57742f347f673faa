"""One container under runc, as restricted as a pod may be: read-only, no capability, no new privilege."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.images.image import Image

# Readers may not see these of the machine: the defaults of container runtimes.
_MASKED = ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"]
_READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


@dataclass(frozen=True)
class ContainerLimits:
    """The limits of a container, beside its image."""

    memory_bytes: int
    writable: tuple[tuple[Path, str], ...] = ()  # folder of the machine, folder in the container
    readable: tuple[tuple[Path, str], ...] = ()
    tmp_bytes: int = 64 << 20
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the image's
    groups: tuple[int, ...] = ()  # beside the image's


def runtime_config(image: Image, command: Sequence[str], limits: ContainerLimits) -> dict[str, Any]:
    """The OCI runtime's configuration. The network is the machine's, so ports on loopback are reachable."""
    user, _, group = image.config["User"].partition(":")
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        _tmpfs("/dev", 65536, "mode=755"),
        _tmpfs("/dev/shm", limits.tmp_bytes, "mode=1777", "nodev"),
        _tmpfs("/tmp", limits.tmp_bytes, "mode=1777", "nodev"),
    ]
    for pairs, mode in ((limits.writable, "rw"), (limits.readable, "ro")):
        mounts += [
            {"destination": inside, "type": "bind", "source": str(outside), "options": ["rbind", mode]}
            for outside, inside in pairs
        ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": int(user), "gid": int(group), "additionalGids": list(limits.groups)},
            "args": list(command),
            "env": [f"{name}={value}" for name, value in {**image.environment, **limits.environment}.items()],
            "cwd": image.config.get("WorkingDir") or "/",
            "capabilities": {name: [] for name in ("bounding", "effective", "inheritable", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts")],
            "resources": {"memory": {"limit": limits.memory_bytes}},
            "maskedPaths": _MASKED,
            "readonlyPaths": _READ_ONLY,
        },
    }


def _tmpfs(destination: str, size_bytes: int, *options: str) -> dict[str, Any]:
    return {
        "destination": destination,
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", f"size={size_bytes}", *options],
    }


class Container:
    """`with Container(...) as container`: runs inside, and is gone after it, however that ends."""

    def __init__(
        self, name: str, image: Image, work_dir: Path, limits: ContainerLimits, *, command: Sequence[str]
    ) -> None:
        """Put the bundle and the log into `work_dir`."""
        self.name = name
        self._bundle = work_dir / name
        self._bundle.mkdir(parents=True)
        self.log = work_dir / f"{name}.log"
        config = runtime_config(image, command, limits)
        (self._bundle / "config.json").write_text(json.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Container:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["runc", "run", "--bundle", str(self._bundle), self.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # runc itself ends with the container, and its exit removes the container's state.
        subprocess.run(["runc", "delete", "--force", self.name], capture_output=True)
        assert self._process is not None
        self._process.wait()

    def kill(self, signal_name: str) -> None:
        """Send a signal to process 1 of the container."""
        subprocess.run(["runc", "kill", self.name, signal_name], check=True, capture_output=True)

    def wait(self, timeout_s: float) -> int:
        """The exit status of process 1. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @property
    def runs(self) -> bool:
        """Whether process 1 has not ended."""
        assert self._process is not None
        return self._process.poll() is None
