"""Reads the `config.json` of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgument


def read_config_json(directory: Path, option: str) -> dict[str, Any]:
    """Read the file. `option` is the name of the setting with the directory.

    Raises InvalidArgument for `option` if the file cannot be read, and for `config.json` if it is not a JSON
    object.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(option, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument("config.json", f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidArgument("config.json", "not a JSON object")
    return raw
