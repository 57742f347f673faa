"""A prompt of 131,072 tokens through the whole cluster, and its second turn on another prefill worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.serve.prompt_lengths import long_context_model, words_of
from libs.engine.core.build import EngineOptions, build_engine
from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig
from tests.engine.support import generate, make_spec
from tests.support.clusters.local_cluster import LocalCluster

OUTPUT_TOKENS = 16
QUESTION = " And where is my refund?"
TIMEOUT_S = 7200.0


def text_of(tokenizer: Tokenizer, n_tokens: int) -> str:
    """About so many tokens."""
    words = words_of(n_tokens, seed=n_tokens)
    per_word = len(tokenizer.encode_text(words[:10_000])) / len(words[:10_000].split())
    return words_of(int(n_tokens / per_word), seed=n_tokens)


@pytest.mark.soak
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("n_tokens", [16_384, 131_072])
def test_a_long_prompt_is_answered_as_by_one_process(tmp_path: Path, n_tokens: int) -> None:
    model = long_context_model(DEFAULT_MODEL, tmp_path / "model", 262_144)
    tokenizer = Tokenizer.from_dir(model)
    prompts = [text_of(tokenizer, n_tokens)]
    answers: list[str] = []
    config = ClusterConfig(
        run_dir=tmp_path,
        model=model,
        prefill=2,
        decode=1,
        drafts="off",
        draft_model=None,
        drafters=0,
        allow_requested_prefill=True,
    )
    with LocalCluster(config) as site:
        for turn in range(2):
            reply = site.client.complete(
                prompts[turn],
                temperature=0.0,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                timeout_s=TIMEOUT_S,
                headers={"x-slipstream-prefill": f"prefill-{turn}"},
            )
            answers.append(reply.text)
            prompts.append(prompts[0] + reply.text + QUESTION)
            assert reply.usage is not None
            print(turn, reply.usage)
            # The last tokens of the first prompt may be others in the second one, which goes on behind them.
            assert reply.usage.cached_tokens >= turn * (len(tokenizer.encode_text(prompts[0])) - 128)
        site.assert_idle()
    engine = build_engine(model, EngineOptions(threads=1))
    for number in range(2):
        ids = np.array(tokenizer.encode_text(prompts[number]))
        assert len(ids) > 0.9 * n_tokens
        name = str(number)
        tokens = generate(engine, [make_spec(name, ids, max_tokens=OUTPUT_TOKENS, ignore_eos=True)])[name]
        assert tokenizer.decode(tokens) == answers[number]
