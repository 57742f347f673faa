"""The switches by which clients ask for reasoning, as one setting. Pure.

Every server has another switch: vLLM and SGLang read `chat_template_kwargs`, Moonshot's API `thinking`,
Qwen's `enable_thinking`, OpenRouter `reasoning`, and OpenAI's `reasoning_effort`. The first of them in this
order counts. None of them: the model's default. Nothing bounds reasoning alone: a budget is refused by name,
save Anthropic's `thinking.budget_tokens`, which is a target there and is named as ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from services.router.api.json_body import Flag, Text, path_of
from slipstream import bounds
from slipstream.bound import Rule

# The efforts that say nothing: the model's default.
_DEFAULT_EFFORTS = ("default", "auto")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", *_DEFAULT_EFFORTS)
_TYPES: Mapping[object, bool | None] = {
    "enabled": True,
    "adaptive": True,
    "disabled": False,
    "auto": None,
    None: None,
}
_THINKING_FIELDS = frozenset({"type", "keep"})


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Variables of chat templates. `clear_thinking` False keeps the reasoning of earlier answers."""

    thinking: Flag = None
    enable_thinking: Flag = None
    clear_thinking: Flag = None
    preserve_thinking: Flag = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenRouter's object, whose `effort` OpenAI's Responses have too."""

    enabled: Flag = None
    effort: Text = None

    REFUSED: ClassVar[Mapping[str, tuple[object, ...]]] = {"exclude": (False,), "max_tokens": ()}


class ThinkingSwitches(msgspec.Struct, frozen=True):
    """The switches of one body."""

    template: TemplateOptions | None = None
    thinking: Any = None
    enable_thinking: bool | None = None
    reasoning: ReasoningOptions | None = None
    effort: str | None = None


def parse_thinking(given: ThinkingSwitches, ignore: Callable[[str], None]) -> tuple[bool | None, bool]:
    """Whether the model reasons (None: its default), and whether the reasoning of earlier answers stays.

    `ignore` gets the paths of fields without effect. Raises InvalidArgument, also for a switch that does not
    count.
    """
    moonshot, keeps = _moonshot(given.thinking, ignore)
    switches = [moonshot, given.enable_thinking]
    if given.reasoning is not None:
        switches.append(thinks_of(given.reasoning, bounds.REASONING_EFFORT, "reasoning.effort"))
    switches.append(_of_effort(given.effort, bounds.REASONING_EFFORT))
    if (template := given.template) is not None:
        switches = [template.thinking, template.enable_thinking, *switches]
        if template.preserve_thinking is not None:
            keeps = template.preserve_thinking
        elif template.clear_thinking is not None:
            keeps = not template.clear_thinking
    return next((switch for switch in switches if switch is not None), None), keeps


def thinks_of(given: ReasoningOptions, rule: Rule, field: str | None = None) -> bool | None:
    """Whether the object asks for reasoning. Raises InvalidArgument for an effort that does not exist."""
    by_effort = _of_effort(given.effort, rule, field)
    return by_effort if given.enabled is None else given.enabled


def _of_effort(effort: str | None, rule: Rule, field: str | None = None) -> bool | None:
    if effort is None or effort in _DEFAULT_EFFORTS:
        return None
    if effort not in EFFORTS:
        raise rule.refused(field)
    return effort != "none"


def _moonshot(given: Any, ignore: Callable[[str], None]) -> tuple[bool | None, bool]:
    """`{"type": "enabled" or "disabled", "keep": "all" or null}`, or a plain switch."""
    if given is None or isinstance(given, bool):
        return given, False
    kind = given.get("type") if isinstance(given, dict) else ""
    if not isinstance(kind, str | None) or kind not in _TYPES:
        raise bounds.THINKING.refused()
    if given.get("keep") not in ("all", None):
        raise bounds.THINKING.refused("thinking.keep")
    for name in sorted(given.keys() - _THINKING_FIELDS):
        ignore(path_of("thinking", name))
    return _TYPES[kind], given.get("keep") == "all"
