"""The cost of prompts with a common prefix that reach a worker together, with and without sharing.

    python -m bench.siblings [--siblings 8] [--prefix 2048] [--own 64] [--rounds 5] [--json]

The shipped model runs both ways in turn on new prompts. All prompts reserve their pages before the first
step, as simultaneous requests do, so a prefix cache alone finds nothing. Printed are processor milliseconds
until all prompts have their first token, the rows computed, and the ratio of the medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from bench.command_line import bench_parser, print_report
from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.core.engine import PagedEngine
from libs.engine.step.types import SamplingParams, SequenceSpec
from supervisor.configuration.cluster_options import DEFAULT_MODEL


def run_round(engine: PagedEngine, prompts: list[np.ndarray]) -> tuple[float, int]:
    """Processor milliseconds until the last first token, and rows computed."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    began_s = time.process_time()
    for number, prompt in enumerate(prompts):
        engine.reserve(SequenceSpec(f"s{number}", prompt, sampling))
    for number in range(len(prompts)):
        engine.start(f"s{number}")
    n_shared = 0
    while engine.has_work():
        for output in engine.step():
            if output.failure is not None:
                raise output.failure
            n_shared += output.shared_tokens
    elapsed_ms = (time.process_time() - began_s) * 1e3
    for number in range(len(prompts)):
        engine.release(f"s{number}")
    return elapsed_ms, sum(map(len, prompts)) - n_shared


def main() -> int:
    """Measure and print."""
    parser = bench_parser("siblings", __doc__)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=2048, help="tokens in common")
    parser.add_argument("--own", type=int, default=64, help="tokens after the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    options = parser.parse_args()
    n_pages = 2 * options.siblings * (options.prefix + options.own + 128) // 64
    model = build_engine(options.model, EngineOptions(n_pages=n_pages, threads=1)).model
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {"shared": [], "separate": []}
    rows: dict[str, int] = {}
    for number in range(options.rounds + 1):
        for name, taken in times.items():
            engine = PagedEngine(model, share_running_prefixes=name == "shared")
            prefix = random.integers(0, model.info.vocab_size, options.prefix)
            own = random.integers(0, model.info.vocab_size, (options.siblings, options.own))
            prompts = [np.concatenate([prefix, mine]).astype(np.uint32) for mine in own]
            elapsed_ms, rows[name] = run_round(engine, prompts)
            if number:  # round 0 warms caches and allocators
                taken.append(elapsed_ms)
    medians = {name: round(statistics.median(taken), 1) for name, taken in times.items()}
    report = {
        "cpu_ms": medians,
        "rows": rows,
        "ratio": round(medians["separate"] / medians["shared"], 2),
    }
    print_report(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
