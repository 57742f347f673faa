"""Write the keys with fixed values into docs/checkpoints.md.

python scripts/gen_checkpoint_keys.py
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libs.engine.model_spec import known_keys
from libs.engine.model_spec.config_section import KeyTable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"
_MARK = "<!-- Made by `python scripts/gen_checkpoint_keys.py` from here on; do not edit. -->\n"
_MODELS = (
    known_keys.TEXT_KEYS,
    known_keys.MULTIMODAL_KEYS,
    known_keys.HEAD_KEYS,
    known_keys.LATENT_HEAD_KEYS,
    known_keys.BLOCK_HEAD_KEYS,
)
_EAGLE_HEADS = (known_keys.HEAD_KEYS, known_keys.LATENT_HEAD_KEYS)
_SECTIONS: tuple[tuple[str, KeyTable], ...] = (
    ("The text model: the top level, or `text_config`", known_keys.TEXT_KEYS),
    ("The top level around `text_config` (Kimi-K2.5)", known_keys.MULTIMODAL_KEYS),
    ("`rope_scaling` or `rope_parameters` without YaRN", known_keys.PLAIN_ROPE_KEYS),
    ("`rope_scaling` or `rope_parameters` with YaRN", known_keys.YARN_KEYS),
    ("`quantization_config` of compressed-tensors", known_keys.COMPRESSED_TENSORS_KEYS),
    ("A group in `config_groups`", known_keys.GROUP_KEYS),
    ("`weights` of a group", known_keys.INT4_KEYS),
    ("`quantization_config` of FP8", known_keys.FP8_KEYS),
    ("A draft head (EAGLE-3) of Llama's type", known_keys.HEAD_KEYS),
    ("A draft head (EAGLE-3) with MLA", known_keys.LATENT_HEAD_KEYS),
    ("A block drafter (DFlash)", known_keys.BLOCK_HEAD_KEYS),
    ("`dflash_config` of a block drafter", known_keys.BLOCK_FLAG_KEYS),
    ("`eagle_config` of a draft head", known_keys.HEAD_FLAG_KEYS),
)


def render(page: str) -> str:
    """The page with new lists after the mark. Keys that several sections treat alike stand in one list."""
    prose = page.partition(_MARK)[0]
    models = _shared(_MODELS)
    heads = _without(_shared(_EAGLE_HEADS), models)
    tables = [
        ("Both kinds of model and all kinds of draft heads", models),
        ("Both kinds of EAGLE-3 heads", heads),
    ]
    for title, table in _SECTIONS:
        shared = [of for of, known in ((models, _MODELS), (heads, _EAGLE_HEADS)) if table in known]
        tables.append((title, functools.reduce(_without, shared, table)))
    return prose + _MARK + "".join(_section(title, table) for title, table in tables if table.fixed)


def _shared(tables: Sequence[KeyTable]) -> KeyTable:
    """What all of these tables say of the same keys."""
    first, *others = tables
    unlike = {key for table in tables for key in table.without_effect}
    return KeyTable(
        used=first.used.intersection(*(other.used for other in others)) - unlike,
        fixed={key: of for key, of in first.fixed.items() if all(o.fixed.get(key) == of for o in others)},
        without_effect={
            key: why
            for key, why in first.without_effect.items()
            if all(other.without_effect.get(key) == why for other in others)
        },
    )


def _without(table: KeyTable, shared: KeyTable) -> KeyTable:
    """The table without the keys of another one."""
    known = shared.used | set(shared.fixed) | set(shared.without_effect)
    return KeyTable(
        used=table.used - known,
        fixed={key: of for key, of in table.fixed.items() if key not in known},
        without_effect={key: why for key, why in table.without_effect.items() if key not in known},
    )


def _section(title: str, table: KeyTable) -> str:
    fixed = [f"{key}: {_values(supported)}" for key, (supported, _) in sorted(table.fixed.items())]
    return f"\n### {title}\n\n{', '.join(f'`{key}`' for key in fixed)}\n"


def _values(supported: Sequence[Any]) -> str:
    return " or ".join(json.dumps(value) for value in supported) or "null"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
