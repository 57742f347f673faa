"""The served model in the form of Anthropic's API, which clients ask for with a header. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

VERSION_HEADER = "anthropic-version"


def model_object(name: str, *, created_unix_s: int, max_context_tokens: int) -> Mapping[str, Any]:
    """One name of the model."""
    created = datetime.datetime.fromtimestamp(created_unix_s, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": max_context_tokens,
        "max_tokens": max_context_tokens,
        "lifecycle": "active",
    }


def model_page(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """All models on one page."""
    return {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
