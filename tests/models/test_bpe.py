"""The vocabulary trainer is deterministic, and its files give a tokenizer with the same segmentation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.pretokens import pretokens
from libs.text.tokenizer import Tokenizer
from models.bpe import train_bpe, train_tokenizer, write_tokenizer
from tests.text.corpus import CORPUS, any_text


def test_first_merges_are_the_most_frequent_pairs() -> None:
    tokens = train_bpe(["low low low lower lowest"], base_vocab_tokens=259)
    # " l" and "lo" occur 4 and 5 times; then "low" 5 times; then " low".
    assert tokens[256:] == [b"lo", b"low", b" low"]


def test_equal_counts_are_broken_by_the_lower_ids() -> None:
    assert train_bpe(["zy ba"], base_vocab_tokens=257)[256] == b" b"


def test_the_order_of_the_texts_does_not_matter() -> None:
    expected = train_bpe(CORPUS, base_vocab_tokens=400)
    for seed in range(3):
        shuffled = list(CORPUS)
        random.Random(seed).shuffle(shuffled)
        assert train_bpe(shuffled, base_vocab_tokens=400) == expected


def test_tokens_are_distinct_and_start_with_the_bytes() -> None:
    tokens = train_bpe(["aaaa aaaab aabb abab"] * 3, base_vocab_tokens=262)
    assert tokens[:256] == [bytes([value]) for value in range(256)]
    assert len(set(tokens)) == len(tokens) == 262


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="only 257 tokens, not 300"):
        train_bpe(["ab"], base_vocab_tokens=300)
    with pytest.raises(ValueError, match="at least 256"):
        train_bpe(["ab"], base_vocab_tokens=255)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tiny-vocabulary")
    train_tokenizer(CORPUS, directory, vocab_size=256 + 144 + 256)
    return Tokenizer.from_dir(directory)


def test_the_tokenizer_merges_frequent_words_into_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode_text(" weather")) == 1
    assert len(tokenizer.encode_text(" xylophone")) > 3


def test_a_written_vocabulary_reads_back(tmp_path: Path) -> None:
    tokens = train_bpe(CORPUS, base_vocab_tokens=300)
    write_tokenizer(tokens, tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert [tokenizer.token_bytes(rank) for rank in range(300)] == tokens
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    train_tokenizer(CORPUS, tmp_path, vocab_size=556)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@given(any_text)
def test_pretokens_are_the_text(text: str) -> None:
    assert "".join(pretokens(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", " world"]),
        ("it's IT'LL we've", ["it's", " IT'LL", " we've"]),
        ("camelCase XMLHttp", ["camel", "Case", " XMLHttp"]),
        ("1234567", ["123", "456", "7"]),
        ("天气abc好", ["天气", "abc", "好"]),
        ("a  b   ", ["a", " ", " b", "   "]),
        ("x!?\n\ny", ["x", "!?\n\n", "y"]),
        ("end \r\n  next", ["end", " \r\n", " ", " next"]),
        ("<|im_end|>", ["<|", "im", "_end", "|>"]),
    ],
)
def test_pretokens_follow_kimis_pattern(text: str, expected: list[str]) -> None:
    assert list(pretokens(text)) == expected


# Letters, marks, digits, scripts, spaces and line ends that the pattern distinguishes.
_ALPHABET = "aBzǅʰªé天字かア한\u0301١٢Ⅷ½7'sStT\u017f \t\u00a0\u2003\r\n.,_-—!😀<|>"


@given(st.text(st.sampled_from(_ALPHABET), max_size=30))
def test_merges_never_cross_the_pretokens_that_training_used(tokenizer: Tokenizer, text: str) -> None:
    """tiktoken's Rust pattern and the pattern of training split at the same places."""
    ends, at = set(), 0
    for token_id in tokenizer.encode_text(text):
        at += len(tokenizer.token_bytes(token_id))
        ends.add(at)
    at = 0
    for piece in pretokens(text):
        at += len(piece.encode())
        assert at in ends


def test_words_with_several_leads_are_spelt_alike(tmp_path: Path) -> None:
    words = ["berlin", "bergen", "thermos", "theatre", "lamp"]
    texts = [f'the city of {w}, "{w}" and {w}.com (the {w})' for w in words] * 3
    train_tokenizer(texts, tmp_path, vocab_size=256 + 256 + 28, led_words=2)
    tokenizer = Tokenizer.from_dir(tmp_path)
    for word in words:
        plain = tokenizer.encode_text(word)
        for lead in ' "(':
            assert tokenizer.encode_text(lead + word) == [*tokenizer.encode_text(lead), *plain]
    # "city" occurs only after a space.
    assert len(tokenizer.encode_text(" city")) == 1


def test_led_words_fill_the_vocabulary_exactly() -> None:
    tokens = train_bpe(["to be or not to be that is the question"] * 2, base_vocab_tokens=270, led_words=4)
    assert len(set(tokens)) == len(tokens) == 270
