"""Write the tables of known keys into docs/checkpoints.md.

python scripts/gen_checkpoint_keys.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from libs.engine.model_spec import known_keys
from libs.engine.model_spec.config_section import KeyTable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"
_MARK = "<!-- Made by `python scripts/gen_checkpoint_keys.py` from here on; do not edit. -->\n"
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
    """The page with new tables after the mark."""
    prose = page.partition(_MARK)[0]
    return prose + _MARK + "".join(_section(title, table) for title, table in _SECTIONS)


def _section(title: str, table: KeyTable) -> str:
    return f"\n### {title}\n\n| Keys | Supported | Why |\n|---|---|---|\n" + "".join(_rows(table))


def _rows(table: KeyTable) -> Iterator[str]:
    yield _row(sorted(table.used), "used", "")
    for reason, keys in _by_reason({key: reason for key, (_, reason) in table.fixed.items()}):
        values = [" or ".join(map(_value, table.fixed[key][0])) or "null" for key in keys]
        yield _row(keys, "; ".join(values), reason)
    for reason, keys in _by_reason(table.without_effect):
        yield _row(keys, "any value, without effect", reason)


def _by_reason(reasons: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    return [
        (reason, sorted(key for key in reasons if reasons[key] == reason))
        for reason in dict.fromkeys(reasons.values())
    ]


def _row(keys: list[str], supported: str, why: str) -> str:
    return f"| {', '.join(f'`{key}`' for key in keys)} | {supported} | {why} |\n"


def _value(value: Any) -> str:
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
