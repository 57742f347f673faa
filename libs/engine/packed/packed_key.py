"""Which file holds a checkpoint's packed weights, and which weights are in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

# Of the names and forms of what a loader stores. The bytes of the kernels' library stand for their layout.
PACKING_VERSION = 1
_SUFFIX = ".packed"


def packed_path(folder: Path, model_dir: Path, library: Path, weight_dtype: str) -> Path:
    """One file for a model directory, a variant of the kernels and a dtype; a new checkpoint replaces it."""
    parts = [str(model_dir.resolve()), library.name, weight_dtype]
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()
    return folder / f"{model_dir.resolve().name}-{digest}{_SUFFIX}"


def packed_key(
    model_dir: Path, shards: Iterable[str], library: Path, weight_dtype: str, weights_digest: str
) -> str:
    """Hex; another one for other contents, for files that were written later, and for other kernels.

    Time of change as well: what writes into a shard, or replaces it, may set the time of modification back.
    """
    found = [(name, (model_dir / name).stat()) for name in shards]
    files = [(name, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in found]
    kernels = hashlib.blake2b(library.read_bytes(), digest_size=16).hexdigest()
    parts = [PACKING_VERSION, library.name, kernels, weight_dtype, weights_digest, files]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
