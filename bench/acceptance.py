"""Acceptance length of the draft head on held-out dialogues, through the serving engine.

    python -m bench.acceptance [--dialogues 200] [--drafts 3] [--json]

The engine generates every assistant turn greedily from its correct history, with drafts, as a decode worker
does. The acceptance length is the mean number of tokens of a decode step, the bonus token included; the
first token of a turn comes from prefill and is no decode step.

`--cached-prefixes` lets the turns of a dialogue reuse each other's KV. A reused position has no feature, so
the head then sees less of the prompt. `--compare` also runs without drafts and compares text and speed.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from libs.engine.core.build import EngineOptions, build_drafter, build_engine
from libs.text.special_tokens import IM_END
from libs.text.tokenizer import Tokenizer
from models.engine_run import Generation, generate
from models.evaluate import held_out_turns
from models.settings import BASE_DIR, EAGLE_DIR
from slipstream.errors import SlipstreamError


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """Options of a run. `weight_dtype` "auto" keeps the checkpoint's."""

    base_dir: Path = BASE_DIR
    eagle_dir: Path = EAGLE_DIR
    dialogues: int = 200
    drafts: int = 3
    max_tokens: int = 160
    cached_prefixes: bool = False
    compare: bool = False
    weight_dtype: str = "auto"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The figures of a run.

    `accepted_at[j]`: share of the steps that accepted draft j (from 0). `identical` and `speedup` (of whole
    runs, prefill included) are None without a comparison.
    """

    acceptance_length: float
    accepted_at: tuple[float, ...]
    dialogues: int
    turns: int
    drafts: int
    decode_steps: int
    tokens: int
    cached_prefixes: bool
    wall_s: float
    identical: bool | None = None
    speedup: float | None = None


def measure(options: AcceptanceOptions) -> Acceptance:
    """Run the engine and the head over the dialogues."""
    tokenizer = Tokenizer.from_dir(options.base_dir)
    turns = held_out_turns(tokenizer, options.dialogues)
    prompts = [turn.prompt_ids for turn in turns]
    stop = tokenizer.special_id(IM_END)
    drafted, wall_s = _run(options, prompts, stop, with_drafts=True)
    identical = speedup = None
    if options.compare:
        plain, plain_s = _run(options, prompts, stop, with_drafts=False)
        identical = [r.token_ids for r in plain] == [r.token_ids for r in drafted]
        speedup = plain_s / wall_s
    lengths = Counter(length for reply in drafted for length in reply.step_lengths)
    steps = sum(lengths.values())
    tokens = sum(length * count for length, count in lengths.items())
    return Acceptance(
        acceptance_length=tokens / max(steps, 1),
        accepted_at=_accepted_at(lengths, options.drafts),
        dialogues=options.dialogues,
        turns=len(turns),
        drafts=options.drafts,
        decode_steps=steps,
        tokens=tokens,
        cached_prefixes=options.cached_prefixes,
        wall_s=wall_s,
        identical=identical,
        speedup=speedup,
    )


def _accepted_at(lengths: Counter[int], drafts: int) -> tuple[float, ...]:
    steps = max(sum(lengths.values()), 1)
    return tuple(sum(n for length, n in lengths.items() if length > j + 1) / steps for j in range(drafts))


def _run(
    options: AcceptanceOptions, prompts: Sequence[Sequence[int]], stop: int, *, with_drafts: bool
) -> tuple[list[Generation], float]:
    precision: Any = options.weight_dtype
    engine = build_engine(
        options.base_dir,
        EngineOptions(draft_model_dir=options.eagle_dir, weight_dtype=precision, threads=options.threads),
    )
    drafter = build_drafter(options.eagle_dir, options.base_dir) if with_drafts else None
    start_s = time.perf_counter()
    replies = generate(
        engine,
        prompts,
        stop_token_id=stop,
        max_tokens=options.max_tokens,
        drafter=drafter,
        drafts=options.drafts,
        share_prefixes=options.cached_prefixes,
    )
    return replies, time.perf_counter() - start_s


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = bench_parser("acceptance", __doc__)
    parser.add_argument("--base-dir", type=Path, default=BASE_DIR, help="model (default: %(default)s)")
    parser.add_argument("--eagle-dir", type=Path, default=EAGLE_DIR, help="draft head (default: %(default)s)")
    parser.add_argument("--dialogues", type=int, default=200, help="held-out ones (default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=3, help="tokens proposed a step (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of one turn (default: %(default)s)")
    parser.add_argument("--cached-prefixes", action="store_true", help="let turns reuse KV")
    parser.add_argument("--compare", action="store_true", help="also run without drafts")
    parser.add_argument("--weight-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    given = vars(parser.parse_args(argv))
    as_json = given.pop("json")
    try:
        report = asdict(measure(AcceptanceOptions(**given)))
    except (SlipstreamError, OSError) as error:
        sys.exit(f"bench.acceptance: {error}")
    report = {k: _rounded(v) for k, v in report.items()}
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        sys.stdout.write(f"{name:20} {value}\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
