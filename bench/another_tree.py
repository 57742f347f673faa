"""The sources of another commit, for a benchmark that measures them beside this tree's."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("bench", "libs", "services", "slipstream")


def another_tree(commit: str, folder: Path, *, benchmark: Path) -> Path:
    """Unpack a commit's sources into a folder, with this tree's `benchmark` and models.

    To run them, start a process in that folder with PYTHONPATH set to it. Raises CalledProcessError without
    such a commit."""
    archive = subprocess.run(
        ["git", "archive", commit, *_PARTS], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    (folder / "tree.tar").write_bytes(archive.stdout)
    with tarfile.open(folder / "tree.tar") as tar:
        if hasattr(tarfile, "data_filter"):  # Python before 3.11.4 has none
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(folder)
    for source in (benchmark, Path(__file__), ROOT / "bench" / "command_line.py"):
        target = folder / source.resolve().relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    (folder / "models").symlink_to(ROOT / "models")
    return folder
