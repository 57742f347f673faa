"""`tokenizer.json` of the shipped model gives AutoTokenizer the ids that the router's tokenizer makes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL

_LETTERS = "abc XYZ'sT \n\t\r.,!?{}\"01239üÜ你好مرحباǅʰ\u0301\u200d\U0001f600ſ\u212a<|>"


@pytest.fixture(scope="module")
def theirs() -> Any:
    # Loaded where it is used: each process that collects the tests would load it, for seconds.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(DEFAULT_MODEL), trust_remote_code=False, local_files_only=True)


def test_ids_are_equal_for_any_text(theirs: Any) -> None:
    ours, rng = Tokenizer.from_dir(DEFAULT_MODEL), random.Random(1)
    texts = ["".join(rng.choices(_LETTERS, k=rng.randint(0, 60))) for _ in range(1000)]
    texts += ["Where is my order 4821?", '{"order_id": "4821"}', " " * 300 + "x" * 300]
    for text in texts:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode_text(text), text
        assert theirs.decode(ours.encode_text(text)) == text


def test_special_tokens_have_their_ids(theirs: Any) -> None:
    ours = Tokenizer.from_dir(DEFAULT_MODEL)
    assert len(theirs) == ours.vocab_size
    for name, token_id in ours.special_ids.items():
        assert theirs.convert_tokens_to_ids(name) == token_id
