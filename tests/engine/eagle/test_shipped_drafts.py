"""The model and the head of the repository: accepted drafts change no token."""

from __future__ import annotations

import pytest

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.engine_run import generate
from models.helpdesk.dialogues import generate_dialogues
from models.settings import BASE_DIR, EAGLE_DIR, HELD_OUT_SEED
from models.turns import dialogue_turns


@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_prompts", [48, pytest.param(200, marks=pytest.mark.soak)])
def test_greedy_text_is_identical_with_and_without_head_drafts(n_prompts: int) -> None:
    tokenizer = Tokenizer.from_dir(BASE_DIR)
    dialogues = generate_dialogues(HELD_OUT_SEED, n_prompts)
    prompts = [dialogue_turns(tokenizer, dialogue)[0].prompt_ids for dialogue in dialogues]
    assert len(prompts) == n_prompts
    engine = build_engine(
        BASE_DIR,
        EngineOptions(weight_dtype="float32", kv_dtype="float32", draft_model_dir=EAGLE_DIR, threads=1),
    )
    stop = tokenizer.special_id(IM_END)
    plain = generate(engine, prompts, stop_token_id=stop, max_tokens=8)
    drafter = build_drafter(EAGLE_DIR, BASE_DIR)
    drafted = generate(
        engine, prompts, stop_token_id=stop, max_tokens=8, drafter=drafter, share_prefixes=False
    )
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(n == 1 for r in plain for n in r.step_lengths)
    # Each step emits one token of the target; the others are accepted drafts.
    accepted = sum(n - 1 for r in drafted for n in r.step_lengths)
    assert accepted > 0
