"""The switches by which clients ask for reasoning, as one setting. Pure.

Every server has another switch: vLLM and SGLang read `chat_template_kwargs`, Moonshot's API `thinking`, and
OpenAI's `reasoning_effort`. The first of them in this order counts. None of them: the model's default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.router.api.json_body import Flag
from slipstream import bounds

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Variables of chat templates. `clear_thinking` False keeps the reasoning of earlier answers."""

    thinking: Flag = None
    enable_thinking: Flag = None
    clear_thinking: Flag = None
    preserve_thinking: Flag = None


def parse_thinking(
    template: TemplateOptions | None, thinking: Any, effort: str | None
) -> tuple[bool | None, bool]:
    """Whether the model reasons (None: its default), and whether the reasoning of earlier answers stays."""
    switch, keeps = _moonshot(thinking)
    if template is not None:
        if template.preserve_thinking is not None:
            keeps = template.preserve_thinking
        elif template.clear_thinking is not None:
            keeps = not template.clear_thinking
        for given in (template.thinking, template.enable_thinking):
            if given is not None:
                return given, keeps
    if switch is not None or effort is None:
        return switch, keeps
    if effort not in EFFORTS:
        raise bounds.REASONING_EFFORT.refused()
    return effort != "none", keeps


def _moonshot(given: Any) -> tuple[bool | None, bool]:
    """`{"type": "enabled" or "disabled", "keep": "all" or null}`, or a plain switch."""
    if given is None or isinstance(given, bool):
        return given, False
    if not isinstance(given, dict) or given.get("type") not in ("enabled", "disabled", None):
        raise bounds.THINKING.refused()
    if given.get("keep") not in ("all", None):
        raise bounds.THINKING.refused("thinking.keep")
    kind = given.get("type")
    return None if kind is None else kind == "enabled", given.get("keep") == "all"
