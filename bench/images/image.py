"""An image in buildah's store: its root file system, its configuration and its size."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import FailedPrecondition

TIERS = ("router", "prefill", "decode", "drafter", "kvstore")
# Works without a daemon, and where the machine's control groups are of two versions.
_ENVIRONMENT = {"BUILDAH_ISOLATION": "chroot"}


@dataclass(frozen=True)
class Image:
    """A mounted image. `config` is the image's part of the OCI configuration."""

    name: str
    root: Path
    config: Mapping[str, Any]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its containers have."""
        return dict(entry.split("=", 1) for entry in self.config.get("Env", ()))

    def size_bytes(self) -> int:
        """The bytes of all files of the root, hard links once."""
        sizes = {}
        for folder, _, names in os.walk(self.root):
            for name in names:
                found = os.lstat(os.path.join(folder, name))
                sizes[found.st_ino] = found.st_size
        return sum(sizes.values())


def why_no_containers() -> str:
    """The part that this machine lacks to run images, or "" where it lacks nothing."""
    missing = [tool for tool in ("buildah", "runc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    return "" if os.geteuid() == 0 else "only root can mount images and run runc without a user namespace"


def buildah(*arguments: str, timeout_s: float = 600.0) -> str:
    """Run buildah; returns its output. Raises FailedPrecondition with its message."""
    done = subprocess.run(
        ["buildah", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**_ENVIRONMENT, **os.environ},
    )
    if done.returncode != 0:
        raise FailedPrecondition(f"buildah {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def mounted(name: str) -> Iterator[Image]:
    """The image with its root mounted. Raises FailedPrecondition for an image that is not there."""
    container = buildah("from", "--pull-never", name)
    try:
        root = Path(buildah("mount", container))
        config = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
        yield Image(name, root, config)
    finally:
        buildah("rm", container)
