"""The model files of the repository: their size and layout, and the quality of the model.

The floors are well below the figures of models/README.md. They detect broken files, a changed template
or tokenizer, or a wrong kernel, and do not measure quality.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.engine.core.engine import PagedEngine
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.engine_run import generate
from models.evaluate import examine, held_out_turns
from models.networks.architecture import Architecture
from models.networks.export import load_head, load_network
from models.settings import BASE_DIR, EAGLE_DIR, TrainingSettings
from models.turns import share

_DIALOGUES = 12
_CALL_FLOOR = 0.9
_ANSWER_FLOOR = 0.7
_ACCEPTANCE_FLOOR = 2.7


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BASE_DIR)


@pytest.fixture(scope="module")
def engine() -> PagedEngine:
    return build_engine(BASE_DIR, EngineOptions(weight_dtype="float32", draft_model_dir=EAGLE_DIR))


def test_model_files_are_small_and_complete() -> None:
    files = [p for d in (BASE_DIR, EAGLE_DIR) for p in d.iterdir()]
    assert sum(p.stat().st_size for p in files) < 25_000_000
    names = {p.name for p in BASE_DIR.iterdir()}
    index = json.loads((BASE_DIR / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) >= 2
    settings = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert shards | settings | {"tiktoken.model", "tokenizer.json"} <= names


def test_the_config_follows_the_settings(tokenizer: Tokenizer) -> None:
    config = json.loads((BASE_DIR / "config.json").read_text())
    settings = TrainingSettings()
    assert Architecture.from_config(config) == settings.base.architecture
    assert config["model_type"] == "deepseek_v3"
    assert config["max_position_embeddings"] >= 8192
    assert config["vocab_size"] == tokenizer.vocab_size == settings.tokenizer.vocab_size
    generation = json.loads((BASE_DIR / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.special_id(IM_END)
    head = json.loads((EAGLE_DIR / "config.json").read_text())
    assert head["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(settings.eagle.output_layer_ids)


def test_model_files_have_trained_weights() -> None:
    network, head = load_network(BASE_DIR), load_head(EAGLE_DIR)
    for module in (network, head):
        for name, p in module.named_parameters():
            assert bool(torch.isfinite(p).all()), name
            assert float(p.detach().std()) > 0, name


def test_calls_and_answers_are_mostly_right(engine: PagedEngine, tokenizer: Tokenizer) -> None:
    verdicts = examine(engine, tokenizer, held_out_turns(tokenizer, _DIALOGUES))
    assert share(verdicts, "call", "parses") >= 0.95
    assert share(verdicts, "call", "right") >= _CALL_FLOOR
    assert share(verdicts, "answer", "right") >= _ANSWER_FLOOR


def test_drafts_are_mostly_accepted_and_change_no_token(engine: PagedEngine, tokenizer: Tokenizer) -> None:
    prompts = [turn.prompt_ids for turn in held_out_turns(tokenizer, 3)]
    stop = tokenizer.special_id(IM_END)
    plain = generate(engine, prompts, stop_token_id=stop)
    drafter = build_drafter(EAGLE_DIR, BASE_DIR)
    drafted = generate(engine, prompts, stop_token_id=stop, drafter=drafter, share_prefixes=False)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    lengths = np.concatenate([r.step_lengths for r in drafted if r.step_lengths])
    assert lengths.mean() >= _ACCEPTANCE_FLOOR
