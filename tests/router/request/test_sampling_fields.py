"""One row of the table of sampling parameters carries a plain field from JSON and protobuf to the engine."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor

from libs.common.service_bounds import render_markdown
from libs.worker.requests.request_spec import parse_sampling
from services.router.api.openai.request import parse_chat
from services.router.api.rpc.generate_message import parse_generation
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard
from services.router.request.prompt import PromptDraft
from services.router.request.types import GenerationRequest, PromptInput
from slipstream.bounds import BOUNDS
from slipstream.errors import InvalidArgument
from slipstream.requests import GenerateArguments, prompt_request
from slipstream.sampling import SAMPLING_DEFAULTS, SAMPLING_RANGES, SamplingParams
from slipstream.v1 import common_pb2, router_pb2

pytestmark = pytest.mark.parametrize("name", SAMPLING_RANGES)


def _engine_params(request: GenerationRequest, card: ModelCard) -> SamplingParams:
    """Return the engine's parameters by the router's and the worker's mapping."""
    draft = PromptDraft.of(request, card, TokenCache(), tenant="default")
    return parse_sampling(draft.finish(draft.encode(), request_id="r").sampling)


def test_a_plain_field_arrives_at_the_engine_from_every_api(name: str, card: ModelCard) -> None:
    row = SAMPLING_RANGES[name]
    value = int(row.high) if row.whole else row.high
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], name: value}).encode()
    for request in (parse_chat(body)[0][0], parse_generation(prompt_request("hi", {name: value}))):  # type: ignore[misc]
        assert request.sampling.given == {name: value}
        assert getattr(_engine_params(request, card), name) == value


def test_a_field_that_is_left_out_has_its_default(name: str, card: ModelCard) -> None:
    default = SAMPLING_DEFAULTS[name]
    SAMPLING_RANGES[name].check(default)
    assert getattr(_engine_params(GenerationRequest(PromptInput("hi")), card), name) == default


def test_a_worker_refuses_values_out_of_range(name: str) -> None:
    row = SAMPLING_RANGES[name]
    good = {**SAMPLING_DEFAULTS, "max_tokens": 1}
    for bad in (row.high + 1, row.low - 1):
        if bad >= 0 or not row.whole:  # uint32 holds no negative number
            with pytest.raises(InvalidArgument, match=f"^{name}: {row.words}"):
                parse_sampling(common_pb2.SamplingParams(**{**good, name: bad}))  # type: ignore[arg-type]


def test_protos_sdk_and_docs_have_the_field(name: str) -> None:
    row = SAMPLING_RANGES[name]
    stated = router_pb2.Sampling.DESCRIPTOR.fields_by_name[name]
    complete = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    assert stated.has_presence and not complete.has_presence
    is_float = FieldDescriptor.TYPE_FLOAT
    assert (
        (stated.type != is_float)
        == (complete.type != is_float)
        == row.whole
        == (row.field == name and row.whole)
    )
    assert get_type_hints(GenerateArguments)[name] == (int if row.whole else float) | None
    assert BOUNDS[name.upper()] is row
    assert f"- `{name}`: {row.words}" in render_markdown()
