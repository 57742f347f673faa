"""Tokens a second and acceptance length of the shipped model with and without constrained tool calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.engine.step.constraint import TokenConstraint
from libs.structured.answer_grammar import answer_grammar
from libs.structured.constraints import ConstraintFactory
from libs.structured.tool_grammar import CallableTool
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.engine_run import Generation, generate
from models.evaluate import held_out_turns
from models.helpdesk.tools import TOOLS
from models.settings import BASE_DIR, EAGLE_DIR
from slipstream.sampling import OutputConstraint


def measure_engine(*, dialogues: int, threads: int) -> dict[str, Any]:
    """Greedy replies to held-out dialogues: free, and with calls held to the names of the tools."""
    tokenizer = Tokenizer.from_dir(BASE_DIR)
    prompts = [list(turn.prompt_ids) for turn in held_out_turns(tokenizer, dialogues)]
    factory = ConstraintFactory(lambda: GrammarVocabulary.of(tokenizer), n_threads=threads)
    factory.warm_up()
    grammar = answer_grammar(None, [CallableTool(tool.name) for tool in TOOLS], tokenizer.special_ids)
    rules = OutputConstraint(grammar, awaits_calls=True)
    kinds: dict[str, Callable[[], TokenConstraint | None]] = {
        "without": lambda: None,
        "with": lambda: factory.make(rules, ()),
    }
    runs = {name: _Run(constrain, tokenizer.special_id(IM_END), threads) for name, constrain in kinds.items()}
    # In turn, prompt by prompt, so that the load of the machine is the same for both.
    for number, prompt in enumerate(prompts):
        for name in sorted(runs, reverse=bool(number % 2)):
            runs[name].answer(prompt)
    answers = [run.replies for run in runs.values()]
    figures: dict[str, Any] = {name: run.figures() for name, run in runs.items()}
    same = [a.token_ids == b.token_ids for a, b in zip(*answers, strict=True)]
    return {**figures, "turns": len(prompts), "equal_answers": sum(same)}


class _Run:
    """Answers of one engine, and what they take."""

    def __init__(
        self, constrain: Callable[[], TokenConstraint | None], stop_token_id: int, threads: int
    ) -> None:
        self.replies: list[Generation] = []
        self._constrain = constrain
        self._stop_token_id = stop_token_id
        self._engine = build_engine(BASE_DIR, EngineOptions(draft_model_dir=EAGLE_DIR, threads=threads))
        self._drafter = build_drafter(EAGLE_DIR, BASE_DIR)
        self._took_s = self._took_cpu_s = 0.0

    def answer(self, prompt: list[int]) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        self.replies += generate(
            self._engine,
            [prompt],
            stop_token_id=self._stop_token_id,
            drafter=self._drafter,
            constrain=self._constrain,
        )
        self._took_s += time.perf_counter() - began_s
        self._took_cpu_s += time.process_time() - began_cpu_s

    def figures(self) -> dict[str, float]:
        lengths = [length for reply in self.replies for length in reply.step_lengths]
        n_tokens = sum(len(reply.token_ids) for reply in self.replies)
        return {
            "tokens_per_s": round(n_tokens / self._took_s, 1),
            "cpu_ms_per_token": round(self._took_cpu_s / n_tokens * 1e3, 3),
            "acceptance_length": round(sum(lengths) / max(len(lengths), 1), 3),
        }
