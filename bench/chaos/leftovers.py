"""What processes hold: resident memory, descriptors, threads; and files that a run left behind."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.cluster_record import ClusterRecord
from supervisor.process_stats import resident_bytes

_SHARED_MEMORY = Path("/dev/shm")
# The first part of a steady run warms caches and heaps; slopes are those of the rest.
WARM_PART = 0.25
# Processes hold 7 descriptors more at most after runs without a leak (docs/benchmarks/chaos.json).
MAX_MORE_DESCRIPTORS = 16
# Caches that fill take 64 MB/h in that file.
MAX_MB_PER_HOUR = 100.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_bytes: int
    n_descriptors: int


def sample(record: ClusterRecord, *, now_s: float) -> dict[str, Sample]:
    """All running processes by name."""
    found = {}
    for process in record.processes:
        if process.pid is None:
            continue
        try:
            n_descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:  # it ended a moment ago
            continue
        found[process.instance] = Sample(now_s, resident_bytes(process.pid), n_descriptors)
    return found


def shared_memory_files() -> set[str]:
    """Names of files in shared memory."""
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have the processes that begin inside make their temporary files in this folder."""
    folder.mkdir()
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def leftover_files(*folders: Path, ends: str = "") -> list[str]:
    """Paths of all files, sockets and pipes below the folders whose names end so."""
    return sorted(str(path) for folder in folders for path in folder.rglob(f"*{ends}") if not path.is_dir())


def excesses(
    began: Mapping[str, Sample], ended: Mapping[str, Sample], slopes: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """What processes have too much of when they are idle again, and what grew too fast under steady load."""
    found = [f"{name} does not run" for name in began if name not in ended]
    for name in began.keys() & ended.keys():
        more = ended[name].n_descriptors - began[name].n_descriptors
        if more > MAX_MORE_DESCRIPTORS:
            found.append(f"{name} has {more} descriptors more")
    for name, slope in slopes.items():
        if slope["rss_mb_per_hour"] > MAX_MB_PER_HOUR:
            found.append(f"{name} grows by {slope['rss_mb_per_hour']:g} MB an hour")
        if slope["descriptors_per_hour"] > MAX_MORE_DESCRIPTORS:
            found.append(f"{name} opens {slope['descriptors_per_hour']:g} descriptors an hour")
    return sorted(found)


def growth(samples: Sequence[dict[str, Sample]]) -> dict[str, dict[str, float]]:
    """Of each process its growth an hour, after the warm part: memory in MB, and descriptors."""
    found = {}
    for name in samples[-1] if samples else ():
        ours = [each[name] for each in samples if name in each]
        ours = ours[int(len(ours) * WARM_PART) :]
        if len(ours) < 2:
            continue
        hours = [each.at_s / 3600 for each in ours]
        memory = statistics.linear_regression(hours, [each.rss_bytes / 1e6 for each in ours]).slope
        opened = statistics.linear_regression(hours, [each.n_descriptors for each in ours]).slope
        found[name] = {"rss_mb_per_hour": round(memory, 1), "descriptors_per_hour": round(opened, 1)}
    return found
