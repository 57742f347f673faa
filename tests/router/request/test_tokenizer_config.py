"""Each form of tokenizer_config.json in which checkpoints are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.router.request.tokenizer_config import read_tokenizer_config

NOTHING: dict[str, Any] = {
    "tokenizer_class": None,
    "bos_token": None,
    "eos_token": None,
    "pad_token": None,
    "unk_token": None,
    "additional_special_tokens": [],
    "chat_template": None,
}


def read(folder: Path, **config: Any) -> dict[str, Any]:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return dict(read_tokenizer_config(folder))


def test_a_file_that_states_nothing_has_every_name(tmp_path: Path) -> None:
    assert read(tmp_path) == NOTHING
    assert read(tmp_path, bos_token=None, additional_special_tokens=None, chat_template=7) == NOTHING
    for no_list in (5, "abc", {"a": "b"}):
        assert read(tmp_path, additional_special_tokens=no_list) == NOTHING


def test_tokens_are_texts_or_objects_and_other_fields_stay_out(tmp_path: Path) -> None:
    token = {"content": "[EOS]", "lstrip": False}
    given = read(
        tmp_path, bos_token="[BOS]", eos_token=token, additional_special_tokens=["a", token], auto_map={}
    )
    assert given == NOTHING | {
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "additional_special_tokens": ["a", "[EOS]"],
    }


def test_the_chat_template_is_that_of_its_own_file_or_the_default_one(tmp_path: Path) -> None:
    both = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read(tmp_path, chat_template="one")["chat_template"] == "one"
    assert read(tmp_path, chat_template=both)["chat_template"] == "d"
    (tmp_path / "chat_template.jinja").write_text("{{ ü }}", encoding="utf-8")
    assert read(tmp_path, chat_template="one")["chat_template"] == "{{ ü }}"


def test_a_file_without_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        read_tokenizer_config(tmp_path)
