"""Reads the text files of a checkpoint directory: regular files of a bounded size. Errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from libs.common.worker_bounds import MAX_TOKENIZER_FILE_BYTES
from slipstream.credentials.bounded_file import read_bounded


def read_text_file(path: Path) -> str:
    """The text of a file. Raises OSError, and ValueError for what is not UTF-8."""
    try:
        return read_bounded(path, max_bytes=MAX_TOKENIZER_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8") from error


def read_object_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError, and ValueError for any other content."""
    try:
        parsed = json.loads(read_text_file(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold an object")
    return parsed
