"""Answers of a form, over HTTP and gRPC, with drafts, and over the loss of a decode worker."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

from bench.demo.script import TOOLS
from slipstream.client import Client
from slipstream.errors import InvalidArgument
from tests.support.clusters.disturbance import DECODERS
from tests.support.clusters.local_cluster import LocalCluster

MESSAGES = [{"role": "user", "content": "Where is my order 123?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "when"],
    "additionalProperties": False,
}
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA, "strict": True}}
WORKERS_AI_FORM = {"type": "json_schema", "json_schema": SCHEMA}
FINAL = {"type": "function", "function": {"name": "final_result", "parameters": SCHEMA, "strict": True}}
# More tokens than HELD_FROM, where a decode worker dies.
LONG: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{3}$"},
    "minItems": 10,
    "maxItems": 10,
}
HELD_FROM = 20


def post(cluster: LocalCluster, **body: Any) -> tuple[int, dict[str, Any]]:
    data = json.dumps({"messages": MESSAGES, "max_tokens": 300, "temperature": 1.2, **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{cluster.http}/v1/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def said(cluster: LocalCluster, **body: Any) -> dict[str, Any]:
    """The message of an answer that ended."""
    status, answer = post(cluster, **body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    message: dict[str, Any] = choice["message"]
    return message


def streamed(cluster: LocalCluster, **body: Any) -> list[dict[str, Any]]:
    """The choices of all events of a streamed answer."""
    data = json.dumps({"messages": MESSAGES, "max_tokens": 300, "stream": True, **body}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://{cluster.http}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    return [choice for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]]


def text_of(choices: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(item["delta"].get("content") or "" for item in choices if item["index"] == index)


def check(text: str) -> None:
    answer = json.loads(text)
    assert answer.keys() == {"name", "age", "when"}
    assert 1 <= len(answer["name"]) <= 20
    assert 0 <= answer["age"] <= 150
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", answer["when"])


def test_answers_are_valid_under_their_schema(cluster: LocalCluster) -> None:
    for seed in range(2):
        check(said(cluster, response_format=OPENAI_FORM, seed=seed)["content"])
    check(said(cluster, response_format=WORKERS_AI_FORM)["content"])
    thinking = said(
        cluster, response_format=OPENAI_FORM, chat_template_kwargs={"enable_thinking": True}, max_tokens=2000
    )
    check(thinking["content"])
    assert said(cluster, guided_choice=["red", "green"])["content"] in ("red", "green")
    assert re.fullmatch("[a-z]{3}-[0-9]{4}", said(cluster, guided_regex="[a-z]{3}-[0-9]{4}")["content"])
    lark = 'start: "a" b "!"\nb: /[0-9]{1,3}/'
    assert re.fullmatch("a[0-9]{1,3}!", said(cluster, guided_grammar=lark)["content"])


@dataclass(frozen=True)
class _Person:
    name: str
    age: int


def test_an_answer_without_bounds_is_whole_within_its_limit(cluster: LocalCluster) -> None:
    """The shipped model ends few strings by itself, and such an answer says that it ended for its limit."""
    with Client(cluster.routers[0]) as client:
        for seed, content in enumerate(("Give me a person.", "x", "Where is my order 123?")):
            messages = [{"role": "user", "content": content}]
            stream = client.stream_chat(messages, response_format=_Person, max_tokens=60, seed=seed)
            for _ in stream:
                pass
            assert isinstance(stream.reply.parse(_Person), _Person)
            assert stream.reply.finish_reason in ("length", "stop")


def test_a_choice_is_the_models_own_wherever_it_fits(cluster: LocalCluster) -> None:
    """`length` says that the limit changed the answer, also where the prefill worker changed its token."""
    fixed: dict[str, Any] = {"temperature": 0, "messages": [{"role": "user", "content": "Is it open?"}]}
    texts = ["Every item", "Every item has a warranty of 12 months."]
    for choices in (["yes", "no"], ["no", "yes, we are open"], texts):
        _, free = post(cluster, **fixed, guided_choice=choices)
        n_tokens, own = free["usage"]["completion_tokens"], free["choices"][0]["message"]["content"]
        for max_tokens in (3, n_tokens - 1, n_tokens):
            _, answer = post(cluster, **fixed, guided_choice=choices, max_tokens=max_tokens)
            (choice,) = answer["choices"]
            text, finish = choice["message"]["content"], choice["finish_reason"]
            assert text in choices
            assert text != own or max_tokens < n_tokens or finish == "stop"
            assert text == own or (max_tokens < n_tokens and finish == "length"), (choices, max_tokens)


def test_streams_choices_and_log_probabilities_keep_the_form(cluster: LocalCluster) -> None:
    """A streamed answer, each of several choices and gRPC's answer are the same text."""
    form: dict[str, Any] = {"response_format": OPENAI_FORM, "temperature": 1.2, "seed": 11}
    status, whole = post(cluster, **form, n=3, logprobs=True, top_logprobs=2)
    assert status == 200, whole
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) > 1
    for choice in whole["choices"]:
        check(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        tokens = choice["logprobs"]["content"]
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == choice["message"]["content"]
        assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)
    events = streamed(cluster, **form, n=3, logprobs=True, top_logprobs=2)
    assert [text_of(events, index) for index in range(3)] == texts
    for index, choice in enumerate(whole["choices"]):
        mine = [event["logprobs"] for event in events if event["index"] == index and event.get("logprobs")]
        assert [item for part in mine for item in part["content"]] == choice["logprobs"]["content"]
    reply = cluster.client.chat(
        MESSAGES, output={"json_schema": SCHEMA}, temperature=1.2, seed=11, max_tokens=300, top_logprobs=2
    )
    assert reply.text == texts[0]
    assert len(reply.logprobs) == len(whole["choices"][0]["logprobs"]["content"])


def test_a_stop_string_ends_an_answer_within_its_form(cluster: LocalCluster) -> None:
    form: dict[str, Any] = {"response_format": OPENAI_FORM, "temperature": 1.2, "seed": 12}
    whole = said(cluster, **form)["content"]
    stop = '"when"'
    until = whole[: whole.index(stop)]
    assert said(cluster, **form, stop=[stop])["content"] == until
    assert text_of(streamed(cluster, **form, stop=[stop])) == until
    reply = cluster.client.chat(
        MESSAGES, output={"json_schema": SCHEMA}, temperature=1.2, seed=12, max_tokens=300, stop=[stop]
    )
    assert reply.text == until
    status, short = post(cluster, **form, **{"max_tokens": 5})
    assert status == 200
    assert short["choices"][0]["finish_reason"] == "length"
    assert whole.startswith(short["choices"][0]["message"]["content"])


def test_drafts_are_verified_under_a_grammar(cluster: LocalCluster) -> None:
    for temperature in (0.0, 1.0):
        arguments: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 300}
        proposed, until_s = 0, time.monotonic() + 60
        while not proposed:  # no step waits for drafts of a drafter that is late
            assert time.monotonic() < until_s, "the drafter is late for 60 s"
            reply = cluster.client.chat(MESSAGES, output={"regex": "[a-zA-Z ,.]{50}"}, **arguments)
            assert re.fullmatch("[a-zA-Z ,.]{50}", reply.text)
            assert reply.stats is not None
            proposed = reply.stats.proposed_drafts


def test_calls_name_declared_tools_and_hold_their_arguments(cluster: LocalCluster) -> None:
    function = {"type": "function", "function": {"name": "final_result"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    for choice in ("required", function, allowed):
        tools = [FINAL] if choice == "required" else [*TOOLS, FINAL]
        for call in said(cluster, tools=tools, tool_choice=choice)["tool_calls"]:
            assert call["function"]["name"] == "final_result"
            check(call["function"]["arguments"])
    for seed in range(2):
        message = said(cluster, tools=[FINAL], seed=seed, max_tokens=400)
        for call in message.get("tool_calls") or ():
            assert call["function"]["name"] == "final_result"
            check(call["function"]["arguments"])


def test_what_no_grammar_holds_is_refused_by_its_path(cluster: LocalCluster) -> None:
    items = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": items}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, answer = post(cluster, response_format=form)
    assert status == 400
    assert answer["error"]["param"] == "response_format.json_schema.schema.properties.tags.uniqueItems"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    status, answer = post(cluster, tools=[FINAL, tool])
    assert status == 400
    assert answer["error"]["param"] == "tools[1].function.parameters.properties.tags.uniqueItems"
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        cluster.client.chat(MESSAGES, output={"json_schema": schema})


def test_a_killed_decode_worker_changes_no_byte(cluster: LocalCluster) -> None:
    arguments: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 1000, "top_logprobs": 1}
    arguments["output"] = {"json_schema": LONG}
    undisturbed = cluster.client.chat(MESSAGES, **arguments)
    assert len(json.loads(undisturbed.text)) == 10
    assert undisturbed.usage is not None and undisturbed.usage.completion_tokens > 2 * HELD_FROM
    with cluster.gate.held(*DECODERS, from_token=HELD_FROM) as gate:
        stream = cluster.client.stream_chat(MESSAGES, session="structured", **arguments)
        events = iter(stream)
        while next(events).completion_tokens < 3:
            pass
        (running,) = [name for name in DECODERS if cluster.sequences(name)]
        pid = cluster.pid(running)
        os.kill(pid, signal.SIGKILL)
        gate.open()
    for _ in events:
        pass
    assert stream.reply.text == undisturbed.text
    assert [item.token for item in stream.reply.logprobs] == [item.token for item in undisturbed.logprobs]
    assert stream.reply.stats is not None
    assert stream.reply.stats.attempts > 1
    cluster.until_running(running, but=pid)
