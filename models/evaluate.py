"""`python -m models.evaluate`: evaluates the shipped files on held-out dialogues, through the serving engine.

Tool-call turns: whether the call parses, and whether function and arguments are right. Answers: whether every
value of the tool's result is stated. Loss: nats per assistant token, teacher-forced. Acceptance length:
tokens per decode step with 3 greedy drafts, with the bonus token. The history before each turn is the correct
one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.engine.eagle.drafter import DrafterEngine
from libs.engine.step.types import Engine
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.engine_run import generate
from models.helpdesk.dialogues import LONG, Dialogue, generate_dialogues
from models.networks.export import load_network
from models.settings import BASE_DIR, EAGLE_DIR, HELD_OUT_SEED
from models.training.base_train import validate
from models.turns import AssistantTurn, TurnVerdict, dialogue_turns, judge, parse_reply, share

DRAFTS = 3
LONG_TO_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one evaluation, shares in [0, 1].

    The `long_*` figures are of turns that begin after `long_from_tokens` tokens of context.
    """

    dialogues: int
    turns: int
    tool_call_turns: int
    tool_call_parses: float
    tool_call_right: float
    answer_turns: int
    answer_states_values: float
    talk_turns: int
    talk_right: float
    loss_nats_per_token: float
    acceptance_length: float
    acceptance_turns: int
    long_turns: int
    long_from_tokens: int
    long_tool_call_right: float
    long_answer_states_values: float

    def as_dict(self) -> dict[str, Any]:
        """Rounded for printing."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def held_out_turns(tokenizer: Tokenizer, dialogues: int) -> list[AssistantTurn]:
    """All assistant turns of the first held-out dialogues."""
    found = generate_dialogues(HELD_OUT_SEED, dialogues)
    return [turn for dialogue in found for turn in dialogue_turns(tokenizer, dialogue)]


def long_turns(
    tokenizer: Tokenizer, dialogues: int, *, from_tokens: int, to_tokens: int
) -> list[AssistantTurn]:
    """Turns of long held-out dialogues with prompts of [from_tokens, to_tokens] tokens."""
    turns: list[AssistantTurn] = []
    for dialogue in generate_dialogues(HELD_OUT_SEED, dialogues, shape=LONG):
        late = _last_turns(tokenizer, dialogue)
        turns += [t for t in late if from_tokens <= len(t.prompt_ids) <= to_tokens]
    return turns


def _last_turns(tokenizer: Tokenizer, dialogue: Dialogue) -> list[AssistantTurn]:
    return dialogue_turns(tokenizer, dialogue)[-24:]


def examine(engine: Engine, tokenizer: Tokenizer, turns: Sequence[AssistantTurn]) -> list[TurnVerdict]:
    """Make greedy replies to `turns` and judge them."""
    stop = tokenizer.special_id(IM_END)
    results = generate(engine, [turn.prompt_ids for turn in turns], stop_token_id=stop)
    pairs = zip(turns, results, strict=True)
    return [judge(turn, parse_reply(tokenizer, result.token_ids)) for turn, result in pairs]


def evaluate(
    base_dir: Path,
    eagle_dir: Path | None,
    *,
    dialogues: int,
    long_dialogues: int = 4,
    long_from_tokens: int = 4096,
    weight_dtype: str = "float32",
    acceptance_dialogues: int = 60,
) -> Report:
    """Run the whole evaluation, `acceptance_dialogues` of the dialogues also with drafts."""
    tokenizer = Tokenizer.from_dir(base_dir)
    stop = tokenizer.special_id(IM_END)
    precision: Any = weight_dtype
    engine = build_engine(base_dir, EngineOptions(weight_dtype=precision, draft_model_dir=eagle_dir))
    turns = held_out_turns(tokenizer, dialogues)
    verdicts = examine(engine, tokenizer, turns)
    limit = engine.info.max_context_tokens
    last = min(LONG_TO_TOKENS, limit) - 200
    far = long_turns(tokenizer, long_dialogues, from_tokens=long_from_tokens, to_tokens=last)
    far_verdicts = examine(engine, tokenizer, far)
    acceptance_length, drafted = 0.0, 0
    if eagle_dir is not None:
        some = held_out_turns(tokenizer, min(acceptance_dialogues, dialogues))
        drafted = len(some)
        acceptance_length = _acceptance(engine, some, build_drafter(eagle_dir, base_dir), stop)
    loss = validate(load_network(base_dir), tokenizer, dialogues).loss
    return Report(
        dialogues=dialogues,
        turns=len(turns),
        tool_call_turns=_count(verdicts, "call"),
        tool_call_parses=share(verdicts, "call", "parses"),
        tool_call_right=share(verdicts, "call", "right"),
        answer_turns=_count(verdicts, "answer"),
        answer_states_values=share(verdicts, "answer", "right"),
        talk_turns=_count(verdicts, "talk"),
        talk_right=share(verdicts, "talk", "right"),
        loss_nats_per_token=loss,
        acceptance_length=acceptance_length,
        acceptance_turns=drafted,
        long_turns=len(far),
        long_from_tokens=long_from_tokens,
        long_tool_call_right=share(far_verdicts, "call", "right"),
        long_answer_states_values=share(far_verdicts, "answer", "right"),
    )


def _acceptance(engine: Engine, turns: Sequence[AssistantTurn], drafter: DrafterEngine, stop: int) -> float:
    """Tokens per step with drafts, with the bonus token; 0 without a step."""
    replies = generate(
        engine,
        [turn.prompt_ids for turn in turns],
        stop_token_id=stop,
        drafter=drafter,
        drafts=DRAFTS,
        share_prefixes=False,
    )
    steps = sum(len(reply.step_lengths) for reply in replies)
    return sum(sum(reply.step_lengths) for reply in replies) / steps if steps else 0.0


def _count(verdicts: Sequence[TurnVerdict], kind: str) -> int:
    return sum(v.kind == kind for v in verdicts)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m models.evaluate", description=__doc__)
    parser.add_argument("--base-dir", type=Path, default=BASE_DIR, help="model (default: %(default)s)")
    parser.add_argument("--eagle-dir", type=Path, default=EAGLE_DIR, help="head (default: %(default)s)")
    parser.add_argument(
        "--dialogues", type=int, default=500, help="held-out dialogues (default: %(default)s)"
    )
    parser.add_argument("--long-dialogues", type=int, default=4, help="long ones (default: %(default)s)")
    parser.add_argument("--weight-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    eagle_dir = options.eagle_dir if (options.eagle_dir / "config.json").exists() else None
    report = evaluate(
        options.base_dir,
        eagle_dir,
        dialogues=options.dialogues,
        long_dialogues=options.long_dialogues,
        weight_dtype=options.weight_dtype,
    ).as_dict()
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        sys.stdout.write(f"{name:28} {value}\n")


if __name__ == "__main__":
    main()
