"""Bodies that do not fit, and the message of each: a client's error handling may depend on both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.router.api.openai.request import parse_chat, parse_completion
from slipstream.errors import InvalidArgument

CASES = json.loads(Path(__file__).with_name("refused_bodies.json").read_text())
PARSERS = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['path']}-{case['message'][:60]}" for case in CASES])
def test_a_body_is_refused_with_this_message(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        PARSERS[case["path"]](json.dumps(case["body"]).encode(), "")
    assert refused.value.message == case["message"]
    assert case["message"].startswith(f"{refused.value.field}: ")
