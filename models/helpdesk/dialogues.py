"""Generates help-desk dialogues from a seed, to train and evaluate the shipped model.

Every dialogue is a pure function of (seed, index). Arguments of tool calls copy values from the conversation,
and answers state values of tool results. Each assistant message has a check, so that an evaluation needs no
human judgement.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from models.helpdesk.talk import CLOSINGS, FACTS, SMALL_TALK, UNABLE, Company, sample_company, system_prompt
from models.helpdesk.tools import ASK, EMAIL_REPLIES, NOT_FOUND, REPLIES, TOOLS, Tool
from models.helpdesk.values import SAMPLERS, Value

TurnKind = Literal["call", "answer", "talk"]


@dataclass(frozen=True, slots=True)
class Check:
    """The requirements on the assistant message `messages[index]`.

    A "call" has exactly the expected tool calls. An "answer" states `values`, which a tool returned or which
    identify the subject. "talk" is plain text; its `values` come from the system prompt.
    """

    index: int
    kind: TurnKind
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialogue:
    """OpenAI-shaped messages and tools, and what every assistant message must contain."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class DialogueShape:
    """How long dialogues are: turns, sentences of policy in the system prompt, declared tools."""

    min_turns: int = 3
    max_turns: int = 6
    long_prompt_share: float = 0.15
    max_policies: int = 12
    min_tools: int = 2
    max_tools: int = 4


SHORT = DialogueShape()
LONG = DialogueShape(min_turns=20, max_turns=110, long_prompt_share=0.3, max_policies=60)


def generate_dialogue(seed: int, index: int, shape: DialogueShape = SHORT) -> Dialogue:
    """Dialogue `index` of the endless sequence of `seed`."""
    rng = Random(f"slipstream-helpdesk:{seed}:{index}")
    return _Writer(rng, shape).write()


def generate_dialogues(
    seed: int, count: int, *, start: int = 0, shape: DialogueShape = SHORT
) -> Iterator[Dialogue]:
    """Dialogues [start, start + count) of `seed`."""
    for index in range(start, start + count):
        yield generate_dialogue(seed, index, shape)


@dataclass(slots=True)
class _Result:
    """The last successful result, for follow-up questions."""

    tool: Tool
    fields: dict[str, Value]


class _Writer:
    """Writes one dialogue turn by turn. `_last` has the last mentioned value of each kind."""

    def __init__(self, rng: Random, shape: DialogueShape) -> None:
        self._rng = rng
        self._shape = shape
        self._company: Company = sample_company(rng)
        self._tools = rng.sample(TOOLS, rng.randint(shape.min_tools, shape.max_tools))
        self._messages: list[dict[str, Any]] = []
        self._checks: list[Check] = []
        self._last: dict[str, Value] = {}
        self._result: _Result | None = None
        self._n_calls = 0

    def write(self) -> Dialogue:
        rng, shape = self._rng, self._shape
        long_prompt = rng.random() < shape.long_prompt_share
        policies = rng.randint(3, shape.max_policies) if long_prompt else rng.randint(0, 1)
        prompt = system_prompt(rng, self._company, policies=policies)
        self._messages.append({"role": "system", "content": prompt})
        if rng.random() < 0.15:
            self._small_talk()
        for _ in range(rng.randint(shape.min_turns, shape.max_turns)):
            self._turn()
        if rng.random() < 0.25:
            user, *replies = rng.choice(CLOSINGS)
            self._user(rng.choice(user))
            self._say(self._styled(replies[0], replies[1]), "talk")
        schemas = tuple(tool.schema() for tool in self._tools)
        return Dialogue(tuple(self._messages), schemas, tuple(self._checks))

    def _turn(self) -> None:
        """Write one request of the user and the messages up to the answer."""
        rng = self._rng
        draw = rng.random()
        follow_up = self._result.tool.follow_up if self._result else None
        if follow_up is not None and draw < 0.3:
            self._follow_up()
        elif draw < 0.40:
            self._ask_fact()
        elif draw < 0.43:
            self._small_talk()
        elif draw < 0.46:
            self._unable()
        elif draw < 0.54:
            self._two_at_once()
        else:
            self._request()

    def _styled(self, brief: str, friendly: str) -> str:
        return (friendly if self._company.friendly else brief).replace("{company}", self._company.name)

    def _user(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def _say(self, text: str, kind: TurnKind, values: tuple[str, ...] = ()) -> None:
        self._checks.append(Check(len(self._messages), kind, values))
        self._messages.append({"role": "assistant", "content": text})

    def _small_talk(self) -> None:
        user, brief, friendly = self._rng.choice(SMALL_TALK)
        self._user(self._rng.choice(user))
        self._say(self._styled(brief, friendly), "talk")

    def _ask_fact(self) -> None:
        topic = self._rng.choice(sorted(self._company.facts))
        fact, value = FACTS[topic], self._company.facts[topic]
        self._user(self._rng.choice(fact.questions))
        self._say(self._styled(fact.brief, fact.friendly).format(value=value), "talk", (value,))

    def _unable(self) -> None:
        """A request for a tool that is not declared."""
        rng = self._rng
        tool = rng.choice([tool for tool in TOOLS if tool not in self._tools])
        self._user(self._worded(tool, rng.choice(tool.requests), self._sample_arguments(tool)))
        self._say(self._styled(*UNABLE), "talk")
        # A later "that order" or "how much is it" would be ambiguous.
        self._last.clear()
        self._result = None

    def _follow_up(self) -> None:
        assert self._result is not None
        follow_up = self._result.tool.follow_up
        assert follow_up is not None
        self._user(self._rng.choice(follow_up.questions))
        fields = self._result.fields
        values = tuple(str(fields[name]) for name in follow_up.values)
        self._say(self._styled(follow_up.brief, follow_up.friendly).format(**fields), "answer", values)

    def _sample_arguments(self, tool: Tool) -> dict[str, Value]:
        arguments: dict[str, Value] = {}
        for name, sampler in tool.arguments.items():
            known = tool.enums.get(name)
            arguments[name] = self._rng.choice(known) if known else SAMPLERS[sampler](self._rng)
        return arguments

    def _worded(self, tool: Tool, request: str, arguments: Mapping[str, Value]) -> str:
        text = request.format(**arguments)
        for name, sentences in tool.hints.items():
            text += self._rng.choice(sentences[str(arguments[name])])
        return text

    def _request(self) -> None:
        rng = self._rng
        tool = rng.choice(self._tools)
        arguments = self._sample_arguments(tool)
        draw = rng.random()
        known = next(iter(tool.arguments))
        if tool.again and known in self._last and draw < 0.3:
            arguments[known] = self._last[known]
            self._user(self._worded(tool, rng.choice(tool.again), arguments))
        elif tool.partial and draw < 0.5:
            self._user(rng.choice(tool.partial))
            self._say(self._styled(*ASK[tool.asked]), "talk")
            replies = EMAIL_REPLIES if tool.asked == "email" else REPLIES
            self._user(rng.choice(replies).format(value=arguments[tool.asked]))
        else:
            text = self._worded(tool, rng.choice(tool.requests), arguments)
            if draw > 0.9 and known == "order_id":
                # A second number, which the call must not use.
                text = f"I also have order {SAMPLERS['order_id'](rng)}, but this is not about it. {text}"
            self._user(text)
        self._call([(tool, arguments)])

    def _two_at_once(self) -> None:
        """Write a message with two requests of one kind, which needs two calls in one assistant message."""
        rng = self._rng
        single = [tool for tool in self._tools if tool.partial]
        if not single:
            self._request()
            return
        tool = rng.choice(single)
        name = tool.asked
        first, second = self._sample_arguments(tool), self._sample_arguments(tool)
        self._user(rng.choice(tool.requests).format(**first) + f" And also for {second[name]}, please.")
        self._call([(tool, first), (tool, second)])

    def _call(self, calls: list[tuple[Tool, dict[str, Value]]]) -> None:
        """The assistant message with the calls, the tools' messages, and the answer."""
        shaped = []
        for tool, arguments in calls:
            call_id = f"functions.{tool.name}:{self._n_calls}"
            self._n_calls += 1
            function = {"name": tool.name, "arguments": json.dumps(arguments)}
            shaped.append({"id": call_id, "type": "function", "function": function})
        self._checks.append(Check(len(self._messages), "call"))
        self._messages.append({"role": "assistant", "content": "", "tool_calls": shaped})
        texts, values = [], []
        for (tool, arguments), call in zip(calls, shaped, strict=True):
            text, stated = self._run(tool, arguments, str(call["id"]))
            texts.append(text)
            values += stated
        self._say(" ".join(texts), "answer", tuple(values))

    def _run(self, tool: Tool, arguments: dict[str, Value], call_id: str) -> tuple[str, list[str]]:
        """Add the tool's message; returns the answer's text and the values that it states."""
        rng = self._rng
        known = next(iter(tool.arguments))
        if tool.missing and rng.random() < 0.06:
            self._tool_message(call_id, {"error": "not found"})
            self._last.clear()
            self._result = None
            value = arguments[tool.missing]
            text = self._styled(*NOT_FOUND[tool.missing]).format(value=value)
            return text, [str(value)]
        fields = {name: SAMPLERS[sampler](rng) for name, sampler in tool.result.items()}
        self._tool_message(call_id, fields)
        self._last[known] = arguments[known]
        merged = {**arguments, **fields}
        self._result = _Result(tool, merged)
        text = self._styled(tool.brief, tool.friendly).format(**merged)
        return text, [str(merged[name]) for name in tool.values]

    def _tool_message(self, call_id: str, fields: Mapping[str, Value]) -> None:
        content = json.dumps(fields)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
