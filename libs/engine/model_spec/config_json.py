"""Reads the JSON files of a checkpoint directory strictly: no repeated key, no NaN, bounded in size."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libs.common.worker_bounds import MAX_CONFIG_BYTES
from slipstream.credentials.bounded_file import read_bounded
from slipstream.errors import InvalidArgument


def read_config_json(directory: Path, option: str) -> dict[str, Any]:
    """Read `config.json`. `option` is the name of the setting with the directory.

    Raises InvalidArgument for `option` if the file cannot be read. Raises it for the file's path unless that
    holds one JSON object without repeated keys: a model and its draft head have files of the same name.
    """
    return read_json_object(directory / "config.json", option, MAX_CONFIG_BYTES)


def read_json_object(path: Path, option: str, max_bytes: int) -> dict[str, Any]:
    """Read a file of at most `max_bytes` as `read_config_json` does. Errors name the file."""
    try:
        data = read_bounded(path, max_bytes=max_bytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise InvalidArgument(str(path), f"has more than {max_bytes} bytes") from None
        raise InvalidArgument(option, f"cannot read {path}: {error.strerror}") from error
    try:
        raw = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(str(path), f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidArgument(str(path), "not a JSON object")
    return raw


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"{repeated!r} is stated twice in one object")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
