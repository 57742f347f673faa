"""Ids of the special tokens, round trips, and splitting of long input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.special_tokens import RESERVED_TOKENS, special_ids
from libs.text.tokenizer import MAX_ENCODE_CHARS, MAX_RUN_CHARS, Tokenizer, split_long
from tests.text.corpus import any_text, hostile_text

K25_IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|start_header_id|>": 163590,
    "<|end_header_id|>": 163591,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}


def test_the_special_ids_for_kimis_vocabulary_are_kimis() -> None:
    ids = special_ids(163584)
    assert {name: ids[name] for name in K25_IDS} == K25_IDS
    assert sorted(ids.values()) == list(range(163584, 163840))
    assert ids["<|reserved_token_163589|>"] == 163589


def test_special_ids_follow_the_base_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == tokenizer.base_vocab_tokens + RESERVED_TOKENS
    for name, token_id in K25_IDS.items():
        assert tokenizer.special_id(name) == token_id - 163584 + tokenizer.base_vocab_tokens
        assert tokenizer.special_name(tokenizer.special_id(name)) == name
    assert tokenizer.special_name(0) is None


@given(any_text)
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()


@given(hostile_text)
def test_text_never_becomes_a_special_id(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert all(token_id < tokenizer.base_vocab_tokens for token_id in ids)
    assert tokenizer.decode(ids) == text


def test_a_lone_surrogate_is_encoded_as_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b")) == "a\ufffdb"


def test_decode_skips_special_tokens_by_default(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_text("hé"), tokenizer.special_id("<|im_end|>"), *tokenizer.encode_text("!")]
    assert tokenizer.decode(ids) == "hé!"
    assert tokenizer.decode(ids, keep_special=True) == "hé<|im_end|>!"


def test_decode_replaces_malformed_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([0xE5, 0xA4]) == "\ufffd"
    assert tokenizer.decode([0xE5, tokenizer.special_id("<think>")], keep_special=True) == "\ufffd<think>"


@pytest.mark.parametrize("offset", [-1, 0])
def test_an_id_outside_of_the_vocabulary_is_an_error(tokenizer: Tokenizer, offset: int) -> None:
    token_id = tokenizer.vocab_size if offset == 0 else offset
    with pytest.raises(ValueError, match="outside of"):
        tokenizer.decode([token_id])


def test_only_plain_ids_have_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("hé!")
    for plain in (ids, ids[:1], []):
        assert tokenizer.decode_plain(plain) == tokenizer.decode_bytes(plain)
    for other in (tokenizer.special_id("<think>"), tokenizer.vocab_size - 1, tokenizer.vocab_size, -1):
        assert tokenizer.decode_plain([other]) is None
        assert tokenizer.decode_plain([*ids, other]) is None
        assert tokenizer.decode_plain([other, *ids]) is None


def _split_by_character(text: str) -> list[str]:
    """The reference: the same rule applied character by character."""
    pieces: list[str] = []
    for offset in range(0, len(text), MAX_ENCODE_CHARS):
        window = text[offset : offset + MAX_ENCODE_CHARS]
        start = run = 0
        for i, char in enumerate(window):
            run = run + 1 if i and char.isspace() == window[i - 1].isspace() else 1
            if run > MAX_RUN_CHARS:
                pieces.append(window[start:i])
                start, run = i, 1
        pieces.append(window[start:])
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short text",
        "x" * MAX_RUN_CHARS,
        "x" * (MAX_RUN_CHARS + 1),
        "a b" + "x" * (2 * MAX_RUN_CHARS + 1) + " c",
        " " * (MAX_RUN_CHARS + 1) + "\n\t" + "y" * 3 * MAX_RUN_CHARS,
        "\x1c\u3000" * (MAX_RUN_CHARS // 2 + 1),
        "word " * (MAX_ENCODE_CHARS // 5) + "tail",
        "天" * (MAX_ENCODE_CHARS + MAX_RUN_CHARS + 7),
    ],
    ids=["empty", "short", "at-limit", "over", "twice", "space", "odd-spaces", "window", "window-and-runs"],
)
def test_long_input_is_split_like_kimis_tokenizer(text: str) -> None:
    pieces = list(split_long(text))
    assert pieces == _split_by_character(text)
    assert "".join(pieces) == text


def test_a_long_run_is_encoded_in_pieces(tokenizer: Tokenizer) -> None:
    text = "!" * (MAX_RUN_CHARS + 1)
    ids = tokenizer.encode_text(text)
    assert ids == tokenizer.encode_text("!" * MAX_RUN_CHARS) + tokenizer.encode_text("!")
    assert tokenizer.decode(ids) == text


def _edit_config(edit: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        path = directory / "tokenizer_config.json"
        config = json.loads(path.read_text())
        edit(config["added_tokens_decoder"])
        path.write_text(json.dumps(config))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tiktoken.model").write_bytes(b"AA== zero\n"), "tiktoken.model:1: expected"),
        (lambda d: (d / "tiktoken.model").write_bytes(b"%%% 0\n"), "tiktoken.model:1: expected"),
        (lambda d: (d / "tiktoken.model").write_bytes(b"AA== 1\n"), "ranks must be 0 to 0"),
        (lambda d: (d / "tiktoken.model").write_bytes(b"AA== 0\n"), "single bytes"),
        (_edit_config(lambda added: added.update({"x": {}})), "added_tokens_decoder"),
        (_edit_config(lambda added: added.update({"7": {"content": "[X]"}})), r"special ids \[7\]"),
        (_edit_config(lambda added: added.pop("402")), r"lacks the special tokens \['<\|im_end"),
        (_edit_config(lambda added: added["402"].update(content="<think>")), "the same name"),
    ],
)
def test_damaged_files_are_refused(
    model_dir: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_a_config_without_added_tokens_gets_kimis_names(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_dir(tmp_path).special_ids == Tokenizer.from_dir(model_dir).special_ids


@given(st.integers(256, 200_000))
def test_every_special_name_is_one_id(base: int) -> None:
    ids = special_ids(base)
    assert sorted(ids.values()) == list(range(base, base + RESERVED_TOKENS))
