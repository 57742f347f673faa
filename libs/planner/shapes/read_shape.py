"""The shape of the model that a `config.json` describes."""

from __future__ import annotations

from pathlib import Path

from libs.common.worker_bounds import MAX_CONFIG_BYTES
from libs.engine.model_spec.config_json import read_json_object
from libs.planner.shapes.llama4_shape import llama4_shape
from libs.planner.shapes.mla_shape import mla_shape
from libs.planner.shapes.model_shape import ModelShape

_LLAMA4_TYPES = ("llama4", "llama4_text")


def read_shape(path: Path) -> ModelShape:
    """`path`: a config.json, or the directory of a checkpoint.

    Raises InvalidArgument that names the option or the key of the file.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = read_json_object(file, "--model", MAX_CONFIG_BYTES)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    if raw.get("model_type") in _LLAMA4_TYPES:
        return llama4_shape(raw, name)
    return mla_shape(raw, name)
