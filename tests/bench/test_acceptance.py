"""The acceptance benchmark on a random model and head with the shipped tokenizer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.acceptance import AcceptanceOptions, _accepted_at, main, measure
from libs.text.tokenizer import Tokenizer
from models.settings import BASE_DIR
from tests.engine.random_head import RandomHead, write_random_head
from tests.support.random_checkpoint import TINY_CONFIG, RandomCheckpoint, write_random_checkpoint


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    vocab_size = Tokenizer.from_dir(BASE_DIR).vocab_size
    base_dir, eagle_dir = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("head")
    write_random_checkpoint(
        base_dir, RandomCheckpoint(config=TINY_CONFIG | {"vocab_size": vocab_size}, dtype="float32")
    )
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(BASE_DIR / name, base_dir / name)
    write_random_head(eagle_dir, RandomHead(vocab_size=vocab_size, draft_vocab_size=300))
    return base_dir, eagle_dir


@pytest.mark.parametrize("cached_prefixes", [False, True])
def test_figures_agree_with_each_other(model_dirs: tuple[Path, Path], cached_prefixes: bool) -> None:
    base_dir, eagle_dir = model_dirs
    found = measure(
        AcceptanceOptions(
            base_dir,
            eagle_dir,
            dialogues=1,
            max_tokens=8,
            cached_prefixes=cached_prefixes,
            compare=True,
            threads=1,
        )
    )
    assert found.turns >= 3
    assert 1 <= found.acceptance_length <= 4
    assert found.acceptance_length == pytest.approx(found.tokens / found.decode_steps)
    assert found.acceptance_length == pytest.approx(1 + sum(found.accepted_at))
    assert found.identical is True


def test_acceptance_by_position() -> None:
    assert _accepted_at(Counter({1: 2, 3: 1, 4: 1}), 3) == (0.5, 0.5, 0.25)


def test_the_command_prints_one_json_object(
    model_dirs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base_dir, eagle_dir = model_dirs
    where = ["--base-dir", str(base_dir), "--eagle-dir", str(eagle_dir)]
    main([*where, "--dialogues", "1", "--max-tokens", "3", "--threads", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["drafts"] == 3
    assert len(report["accepted_at"]) == 3


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^bench.acceptance: .*{tmp_path}"):
        main(["--base-dir", str(tmp_path)])
