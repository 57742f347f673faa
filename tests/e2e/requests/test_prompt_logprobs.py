"""Log probabilities of prompts as evals ask for them, through all services and over lost workers."""

from __future__ import annotations

import math
import os
import signal
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bench.serve.prompt_lengths import words_of
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.step.batch import ForwardBatch
from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from tests.support.clusters.disturbance import PREFILLERS
from tests.support.clusters.local_cluster import LocalCluster

TEXT = "Where is my order? I have waited for two weeks, and get no answer. 订单在哪里?"
# Three steps of a prefill worker.
LONG = words_of(900, seed=4)
TOLERANCE = 2e-3


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEFAULT_MODEL)


def text_of(token: int) -> str:
    name = tokenizer().special_name(token)
    return name if name is not None else tokenizer().token_bytes(token).decode("utf-8", "replace")


def client_of(cluster: LocalCluster) -> Any:
    """An openai.OpenAI; typed as Any, because its types want classes where these tests have JSON."""
    import openai  # half a second of each process that collects the tests

    return openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0)


def ask(cluster: LocalCluster, prompt: Any, **arguments: Any) -> Any:
    """As lm-eval asks for the likelihood of a text."""
    given = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234, **arguments}
    return client_of(cluster).completions.create(model=cluster.client.models()[0], prompt=prompt, **given)


@cache
def reference(text: str) -> torch.Tensor:
    """Log probabilities after each token of the text, computed by one process in one pass."""
    ids = np.array(tokenizer().encode_text(text), np.int32)
    n, n_pages = len(ids), -(-len(ids) // 64)
    runner = ModelRunner.load(DEFAULT_MODEL, RunnerOptions(n_pages=n_pages, threads=1))
    rows = np.arange(n, dtype=np.int32)
    batch = ForwardBatch(
        token_ids=ids,
        positions=rows,
        query_start=np.array([0, n], np.int32),
        context_len=np.array([n], np.int32),
        page_table=np.arange(n_pages, dtype=np.int32)[None],
        logit_rows=rows,
    )
    return torch.log_softmax(runner.forward(batch).logits, dim=-1)


def expected(text: str) -> list[float]:
    """The log probability of each token of the text but the first."""
    ids = torch.tensor(tokenizer().encode_text(text))
    found: list[float] = reference(text)[:-1].gather(-1, ids[1:, None]).squeeze(-1).tolist()
    return found


def check(logprobs: Any, text: str, *, answer_tokens: int) -> None:
    """The object `logprobs` of an answer that echoes the text, in the shape that evals read."""
    ids = tokenizer().encode_text(text)
    n = len(ids)
    assert (
        len(logprobs.tokens) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == n + answer_tokens
    )
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    np.testing.assert_allclose(logprobs.token_logprobs[1:n], expected(text), atol=TOLERANCE)
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
    raw = [tokenizer().token_bytes(i) for i in ids]
    before = [b"".join(raw[:i]).decode("utf-8", "ignore") for i in range(n)]
    assert logprobs.text_offset[:n] == [len(part) for part in before]
    assert logprobs.text_offset[n:] == [len(text)] * bool(answer_tokens)
    most = reference(text)[:-1].argmax(dim=-1).tolist()
    named = [list(top) for top in logprobs.top_logprobs[1:n]]
    assert named == [[text_of(i)] for i in most]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_log_probabilities_of_the_model(cluster: LocalCluster, max_tokens: int) -> None:
    """Twice: the second time the prefix cache has the prompt."""
    for _ in range(2):
        answer = ask(cluster, TEXT, max_tokens=max_tokens)
        (choice,) = answer.choices
        check(choice.logprobs, TEXT, answer_tokens=max_tokens)
        assert choice.text.startswith(TEXT) and (max_tokens or choice.text == TEXT)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_several_prompts_and_choices_have_their_own(cluster: LocalCluster) -> None:
    prompts = [tokenizer().encode_text(text) for text in (TEXT, LONG, TEXT[:5])]
    answer = ask(cluster, prompts, n=2, temperature=1.0)
    texts = [text for text in (TEXT, LONG, TEXT[:5]) for _ in range(2)]
    for choice, text in zip(sorted(answer.choices, key=lambda choice: choice.index), texts, strict=True):
        check(choice.logprobs, text, answer_tokens=1)


def test_a_stream_has_the_same_rows_before_its_answer(cluster: LocalCluster) -> None:
    whole = ask(cluster, LONG, max_tokens=4).choices[0]
    pieces = [p.choices[0] for p in ask(cluster, LONG, max_tokens=4, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    rows = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for row in rows for item in getattr(row, name)]
        if name == "token_logprobs":
            np.testing.assert_allclose(joined[1:], getattr(whole.logprobs, name)[1:], atol=TOLERANCE)
        elif name != "top_logprobs":
            assert joined == getattr(whole.logprobs, name)


def test_rows_of_a_prompt_and_its_answer_are_those_of_decoding(cluster: LocalCluster) -> None:
    ids_of = {tokenizer().token_bytes(i): i for i in range(tokenizer().vocab_size)}
    ids_of |= {name.encode(): i for name, i in tokenizer().special_ids.items()}
    reply = cluster.client.complete(TEXT, temperature=1.0, seed=3, max_tokens=40, top_logprobs=3)
    answer = [ids_of[item.token_bytes] for item in reply.logprobs]
    assert reply.usage is not None and len(answer) == reply.usage.completion_tokens > 10
    again = ask(cluster, [*tokenizer().encode_text(TEXT), *answer], max_tokens=0).choices[0].logprobs
    found = again.token_logprobs[-len(answer) :]
    np.testing.assert_allclose(found, [item.logprob for item in reply.logprobs], atol=TOLERANCE)


def test_prompt_logprobs_have_vllms_shape(cluster: LocalCluster) -> None:
    client, model = client_of(cluster), cluster.client.models()[0]
    ids = tokenizer().encode_text(TEXT)
    wanted = {"extra_body": {"prompt_logprobs": 2}, "max_tokens": 1, "temperature": 0}
    rows = client.completions.create(model=model, prompt=TEXT, **wanted).choices[0].prompt_logprobs
    assert rows[0] is None and len(rows) == len(ids)
    for row, token, logprob in zip(rows[1:], ids[1:], expected(TEXT), strict=True):
        own = row[str(token)]
        assert math.isclose(own["logprob"], logprob, abs_tol=TOLERANCE) and own["rank"] >= 1
        assert own["decoded_token"] == text_of(token)
        assert {1, 2} <= {each["rank"] for each in row.values()} and len(row) in (2, 3)
    messages = [{"role": "user", "content": "Hello!"}]
    chat = client.chat.completions.create(model=model, messages=messages, **wanted)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    reply = cluster.client.chat(messages, prompt_logprobs=2, max_tokens=1, temperature=0.0)
    assert [item.token_id for item in reply.prompt_logprobs][1:] == [
        int(next(iter(row))) for row in chat.prompt_logprobs[1:]
    ]


def test_a_killed_prefill_worker_sends_no_row_twice(cluster: LocalCluster) -> None:
    """It dies with its last step; the other worker computes the whole prompt again."""
    undisturbed = ask(cluster, LONG, max_tokens=3).choices[0]
    with cluster.gate.held(*PREFILLERS, from_token=0) as gate:
        pieces = iter(ask(cluster, LONG, max_tokens=3, stream=True))
        seen = [next(pieces).choices[0]]
        while seen[-1].logprobs is None:
            seen.append(next(pieces).choices[0])
        (running,) = [name for name in PREFILLERS if cluster.sequences(name)]
        pid = cluster.pid(running)
        os.kill(pid, signal.SIGKILL)
        gate.open()
    seen += [piece.choices[0] for piece in pieces]
    rows = [piece.logprobs for piece in seen if piece.logprobs is not None]
    assert [token for row in rows for token in row.tokens] == undisturbed.logprobs.tokens
    found = [value for row in rows for value in row.token_logprobs]
    np.testing.assert_allclose(found[1:], undisturbed.logprobs.token_logprobs[1:], atol=TOLERANCE)
    assert "".join(piece.text for piece in seen) == undisturbed.text
    cluster.until_running(running, but=pid)


def test_a_decode_worker_that_computes_the_prompt_sends_the_rows(cluster: LocalCluster) -> None:
    """Without a prefill worker a decode worker takes their place. A fast restart needs another try."""
    text = words_of(900, seed=5)
    undisturbed = ask(cluster, text, max_tokens=2).choices[0]
    for _ in range(3):
        pids = {name: cluster.pid(name) for name in PREFILLERS}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        answer = ask(cluster, text, max_tokens=2, extra_headers={"x-slipstream-stats": "1"})
        for name, pid in pids.items():
            cluster.until_running(name, but=pid)
        if not answer.slipstream["prefill_worker"]:
            break
    assert answer.slipstream["prefill_worker"] == ""
    degraded = answer.choices[0]
    assert degraded.logprobs.tokens == undisturbed.logprobs.tokens
    np.testing.assert_allclose(
        degraded.logprobs.token_logprobs[1:], undisturbed.logprobs.token_logprobs[1:], atol=TOLERANCE
    )
    assert degraded.text == undisturbed.text
