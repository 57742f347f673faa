"""The safetensors files of a model directory: which there are, and the header of each tensor."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from libs.common.worker_bounds import MAX_CHECKPOINT_INDEX_BYTES
from libs.engine.model.shard_file import read_no_further
from libs.engine.model_spec.config_json import read_json_object
from slipstream.errors import FailedPrecondition, InvalidArgument

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # of safetensors


class CheckpointError(FailedPrecondition):
    """A tensor is missing, or is not what the configuration implies. `tensor` names it."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(f"{tensor}: {reason}")
        self.tensor = tensor
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """`dtype` is safetensors' name of it, such as BF16, I32 or F8_E4M3. The values begin at byte `offset`."""

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of the values in the shard. The number in a dtype's name is its bits."""
        bits = re.search(r"[0-9]+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


def read_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """The headers of all shards by tensor name.

    safetensors checks each header: offsets, overlaps, the length of the file. Raises CheckpointError when a
    shard cannot be read, when two shards hold one tensor, and when the index and the shards differ.
    """
    weight_map = _weight_map(model_dir)
    shards = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
    files = {shard: _open(model_dir, shard) for shard in shards}
    headers: dict[str, TensorHeader] = {}
    for shard, file in files.items():
        offsets = _offsets(model_dir / shard)
        for name in file.keys():  # noqa: SIM118
            if name in headers:
                raise CheckpointError(name, f"stored twice, in {headers[name].shard} and in {shard}")
            tensor = file.get_slice(name)
            headers[name] = TensorHeader(shard, tensor.get_dtype(), tuple(tensor.get_shape()), offsets[name])
    if weight_map is not None:
        _compare(weight_map, headers)
    return headers


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor's values begin, from a header that safetensors has checked."""
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n_bytes))
    header.pop("__metadata__", None)
    return {name: 8 + n_bytes + int(entry["data_offsets"][0]) for name, entry in header.items()}


def shard_names(model_dir: Path) -> list[str]:
    weight_map = _weight_map(model_dir)
    return [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))


def _open(model_dir: Path, shard: str) -> Any:
    path = model_dir / shard
    if not path.is_file():  # a pipe would block
        raise CheckpointError(shard, f"cannot be read: no file in {model_dir}")
    try:
        _cache_header(path)
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors raises its own SafetensorError, OSError and others
        raise CheckpointError(shard, f"cannot be read: {error}") from error


def _cache_header(path: Path) -> None:
    """Read the header first: safetensors maps the file, and a fault on a mapping reads megabytes ahead."""
    with path.open("rb", buffering=0) as file:
        read_no_further(file.fileno())
        file.read(min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES))


def _compare(weight_map: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> None:
    for name, shard in weight_map.items():
        if name not in headers or headers[name].shard != shard:
            raise CheckpointError(name, f"{INDEX_NAME} puts it in {shard}, which does not hold it")
    for name, header in headers.items():
        if name not in weight_map:
            raise CheckpointError(name, f"stored in {header.shard}, but {INDEX_NAME} does not name it")


def _weight_map(model_dir: Path) -> dict[str, str] | None:
    """Tensor name -> shard, as the index states it; None for a directory with one file and no index."""
    if not (model_dir / INDEX_NAME).is_file():
        if not (model_dir / SINGLE_NAME).is_file():
            raise CheckpointError(INDEX_NAME, f"neither it nor {SINGLE_NAME} is in {model_dir}")
        return None
    try:
        raw = read_json_object(model_dir / INDEX_NAME, INDEX_NAME, MAX_CHECKPOINT_INDEX_BYTES)
    except InvalidArgument as error:
        raise CheckpointError(INDEX_NAME, f"the index cannot be used: {error.reason}") from error
    mapping = raw.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(INDEX_NAME, "weight_map is not an object with tensor names")
    for shard in set(map(_plain_name, mapping.values())):
        if not shard.endswith(".safetensors"):
            raise CheckpointError(INDEX_NAME, f"shard {shard!r} is not named *.safetensors")
    return mapping


def _plain_name(shard: object) -> str:
    """A shard is a file of the model directory: an index must not reach outside it."""
    if not isinstance(shard, str) or "\0" in shard or Path(shard).name != shard:
        raise CheckpointError(INDEX_NAME, f"shard {shard!r} is not a plain file name")
    return shard
