"""What a checkpoint states of its tokenizer for clients: its class, its special tokens, its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libs.text.model_files import read_object_file, read_text_file

# The special tokens that have a role by name.
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_tokenizer_config(model_dir: Path) -> Mapping[str, Any]:
    """The fields by the names of tokenizer_config.json, None or empty where it has none.

    Raises OSError, ValueError.
    """
    path = model_dir / "tokenizer_config.json"
    config = read_object_file(path)
    others = config.get("additional_special_tokens")
    return {
        "tokenizer_class": config.get("tokenizer_class"),
        **{role: _content(config.get(role)) for role in _ROLES},
        "additional_special_tokens": [_content(each) for each in others] if isinstance(others, list) else [],
        "chat_template": _chat_template(model_dir, config.get("chat_template")),
    }


def _content(token: object) -> str | None:
    """The text of a token, which transformers also writes as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(model_dir: Path, stated: object) -> str | None:
    """chat_template.jinja goes before the configuration, as in transformers; a list gives its default."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return read_text_file(path)
    if isinstance(stated, list):
        named = {each.get("name"): each.get("template") for each in stated if isinstance(each, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None
