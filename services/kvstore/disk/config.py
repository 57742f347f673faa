"""Checks of the configured disks, before any of them is opened."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from services.kvstore.disk.segment_format import HEADER_BYTES
from services.kvstore.disk.segments.io import CONFIG_ERRNOS
from services.kvstore.disk.tier import segment_bytes_for
from slipstream.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)


def check_disks(directories: Sequence[Path], disk_bytes: int) -> list[str]:
    """Check disks of `disk_bytes` each; returns warnings.

    Raises InvalidArgument for a directory named twice, and FailedPrecondition for one that cannot be created
    or whose filesystem is too small.
    """
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise InvalidArgument("--disk", "names a directory twice")
    warnings = []
    devices: dict[int, Path] = {}
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            filesystem = os.statvfs(directory)
            device = directory.stat().st_dev
        except OSError as error:
            if error.errno in CONFIG_ERRNOS or error.errno == errno.ENOENT:
                raise FailedPrecondition(f"{directory} {_why_not(directory)}: {error}") from None
            warnings.append(f"{directory} does not answer now, its size is not checked: {error}")
            continue
        if not os.access(directory, os.W_OK | os.X_OK):
            if not filesystem.f_flag & os.ST_RDONLY:
                raise FailedPrecondition(f"{directory} is not writable for uid {os.geteuid()}")
            warnings.append(f"{directory} is on a filesystem that is read-only now: it takes no blocks")
        total = filesystem.f_blocks * filesystem.f_frsize
        if total < disk_bytes:
            raise FailedPrecondition(
                f"{directory}: the filesystem has {total} bytes in all, --disk-bytes asks for {disk_bytes}"
            )
        there = sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*"))
        room = filesystem.f_bavail * filesystem.f_frsize + there
        if room < disk_bytes:
            warnings.append(f"{directory}: {room} of {disk_bytes} bytes are free, the tier stays smaller")
        if device in devices:
            warnings.append(f"{directory} and {devices[device]} are on one device and fail together")
        devices.setdefault(device, directory)
    segment_bytes = segment_bytes_for(disk_bytes)
    used = disk_bytes // (segment_bytes + HEADER_BYTES) * (segment_bytes + HEADER_BYTES)
    if used != disk_bytes:
        warnings.append(f"--disk-bytes {disk_bytes} is rounded to {used}: whole segments of {segment_bytes}")
    return warnings


def _why_not(directory: Path) -> str:
    return "is not a directory" if directory.is_file() else "cannot be made, or is not writable"
