"""A tiny vocabulary in Kimi's file format, trained once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.text.tokenizer import Tokenizer
from models.bpe import train_tokenizer
from tests.text.corpus import CORPUS

VOCAB_SIZE = 256 + 144 + 256


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-vocabulary")
    train_tokenizer(CORPUS, directory, vocab_size=VOCAB_SIZE)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)
