"""Files of a checkpoint that cannot be used end the start of a router with a line that names the file."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster import fingerprint
from libs.text import model_files, tokenizer
from services.router.request.model_card import load_model_card
from slipstream.errors import InvalidArgument

FILES = ("config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json")
TEMPLATE = "chat_template.jinja"


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "generation_config.json").write_text("{}")
    (folder / TEMPLATE).write_text("{{ messages }}")
    load_model_card(folder)
    return folder


@pytest.mark.parametrize("name", [*FILES, TEMPLATE])
def test_devices_and_pipes_are_not_read(folder: Path, name: str) -> None:
    """A device may have no end, and a pipe no writer."""
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/null")
    with pytest.raises(OSError, match="is no regular file") as refused:
        load_model_card(folder)
    assert refused.value.filename == str(folder / name)


@pytest.mark.parametrize("name", [*FILES, TEMPLATE])
def test_a_file_beyond_the_bound_is_not_read_whole(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = max((folder / each).stat().st_size for each in (*FILES, TEMPLATE))
    for module in (model_files, tokenizer, fingerprint):
        monkeypatch.setattr(module, "MAX_TOKENIZER_FILE_BYTES", most)
    load_model_card(folder)
    with (folder / name).open("a") as file:
        file.write(" " * (most + 1))
    with pytest.raises(OSError, match=f"has more than {most} bytes") as refused:
        load_model_card(folder)
    assert refused.value.filename == str(folder / name)


@pytest.mark.parametrize("name", sorted({*FILES} - {"tiktoken.model"}))
@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "must hold an object"), ("\xff", "not UTF-8")],
)
def test_what_is_no_json_object_is_named(folder: Path, name: str, text: str, reason: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{folder / name}.* {reason}|^{folder / name} {reason}"):
        load_model_card(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "0.5"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", [1]),
    ],
)
def test_a_default_that_no_request_may_have_is_refused(folder: Path, field: str, value: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(InvalidArgument, match=f"^{path}: {field}: must be a (whole )?number from 0 to "):
        load_model_card(folder)


def test_null_states_no_default(folder: Path) -> None:
    plain = load_model_card(folder).sampling_defaults
    stated = {"temperature": None, "top_p": None, "top_k": 5.0}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    found = load_model_card(folder).sampling_defaults
    assert found == {**plain, "top_k": 5} and type(found["top_k"]) is int
