"""A `top_k` of -1, vLLM's and SGLang's word for off."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.router.api.anthropic.request import parse_messages_body
from services.router.api.openai.request import parse_chat, parse_completion
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.request.model_card import ModelCard, load_model_card
from services.router.request.types import GenerationRequest
from services.router.request.validation import check_values
from slipstream.errors import InvalidArgument

HI: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[dict[str, Any], Callable[[bytes], GenerationRequest]]] = {
    "chat": ({"messages": HI}, lambda data: parse_chat(data)[0][0]),
    "completions": ({"prompt": "hi"}, lambda data: parse_completion(data)[0][0]),
    "messages": ({"messages": HI, "max_tokens": 1}, lambda data: parse_messages_body(data).generation),
    "responses": (
        {"input": "hi"},
        lambda data: parse_response(decode_response(data), EarlierItems(), is_stored=False).generation,
    ),
}


@pytest.mark.parametrize("api", BODIES)
def test_minus_one_is_off_and_nothing_below_it(api: str, card: ModelCard) -> None:
    body, parse = BODIES[api]
    request = parse(json.dumps({**body, "top_k": -1}).encode())
    assert request.sampling.given == {"top_k": 0}
    check_values(request, card)
    with pytest.raises(InvalidArgument, match=r"^top_k: must be a whole number from 0 to 262144, not -2"):
        check_values(parse(json.dumps({**body, "top_k": -2}).encode()), card)


def test_a_checkpoint_may_say_so_too(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"top_k": -1}))
    assert load_model_card(tmp_path / "model").sampling_defaults["top_k"] == 0
