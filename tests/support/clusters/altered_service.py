"""A real service with changes for tests. `RUN_DIR/altered.json`, {instance: {..}}, may have for each:

    arguments   more arguments of its command line
    redirect    {endpoint: another endpoint}: the address to dial in place of a peer's
    states      the context bound in a worker's record, in tokens, whatever its engine takes
    separate    true: each rank of the worker has other memory for KV pages, as ranks on devices have
    early_ranks true: the other ranks of the worker are forks (early_ranks.py)

A test can hold the engines (engine_gate.py). Routers have long time-outs: on a busy machine a worker may be
silent for seconds, and unavailable for a minute when it starts again.

Prompts of one block and more are sent by reference (libs/worker/requests/prompt_cache.py).

Workers with the fake engine die by `os.abort()` in the step that makes output token n of a request with seed
POISON_SEED + n, and all their other requests with them. Each death adds a line to RUN_DIR/poisoned.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import grpc

from tests.support.clusters import engine_gate

POISON_SEED = 666_000_000
# Options of a router in seconds, longer because of the machine's load.
PATIENCE_S = {"silence_s": 6.0, "recovery_wait_s": 300.0}
MIN_PREFIX_REF_TOKENS = 64
# The classes that take the bound as a default.
_PROMPT_REFERENCES = {
    "libs.worker.requests.prompt_cache": "PromptCache",
    "services.router.workers.prompt_delta": "PromptSender",
}


def poison_the_engine(run_dir: Path, instance: str) -> None:
    """Make the fake engine abort at certain requests."""
    from libs.engine.core.fake import FakeModel

    run = FakeModel.run

    def run_or_die(self: FakeModel, batch: Any, rows: Any, stop: Any) -> Any:
        for row in rows:
            at = row.params.seed - POISON_SEED
            if 0 <= at < 1000 and row.n_sampled and row.first_index + row.n_sampled > at:
                with (run_dir / "poisoned").open("a") as deaths:
                    deaths.write(f"{instance}\n")
                os.abort()
        return run(self, batch, rows, stop)

    FakeModel.run = run_or_die  # type: ignore[method-assign]


def name_short_prompts() -> None:
    """Lower the bound of prompt references, also in modules that a fork server has imported."""
    from libs.common import service_bounds

    vars(service_bounds)["MIN_PREFIX_REF_TOKENS"] = MIN_PREFIX_REF_TOKENS
    for module, name in _PROMPT_REFERENCES.items():
        if module in sys.modules:
            getattr(sys.modules[module], name).__init__.__kwdefaults__["min_tokens"] = MIN_PREFIX_REF_TOKENS


def redirect_peers(endpoints: dict[str, str]) -> None:
    """Dial other endpoints in place of certain peers."""
    from libs.common.runtime import process_settings
    from slipstream.rpc.dial import Dial

    class DialElsewhere(Dial):
        def __call__(self, endpoint: str) -> grpc.aio.Channel:
            return Dial(self.tls, self.tokens)(endpoints.get(endpoint, endpoint))

    vars(process_settings)["Dial"] = DialElsewhere


def state_context(tokens: int) -> None:
    """Write another context bound into the worker's record than the engine has."""
    from libs.common.cluster.worker_record import Worker

    check = Worker.__post_init__

    def state(self: Worker) -> None:
        check(self)
        if "max_context_tokens" in self.capacity:
            object.__setattr__(self, "capacity", {**self.capacity, "max_context_tokens": tokens})

    Worker.__post_init__ = state  # type: ignore[method-assign]


def separate_pages() -> None:
    """Let the worker take its ranks for those of devices, as far as their memories are concerned."""
    from libs.engine.parallel import group_runner, limits

    for module in (group_runner, limits):
        vars(module)["has_separate_pages"] = lambda device: True


def be_patient() -> None:
    """Lengthen the router's time-outs for workers, and its quarantine."""
    from services.router.execution.policies import quarantine
    from services.router.server import RouterServer

    build = RouterServer.__init__

    def build_patient(
        self: RouterServer, card: Any, discovery: Any, placements: Any, options: Any, **more: Any
    ) -> None:
        build(self, card, discovery, placements, dataclasses.replace(options, **PATIENCE_S), **more)

    RouterServer.__init__ = build_patient  # type: ignore[method-assign]
    vars(quarantine)["QUARANTINE_S"] = 600.0


def main() -> None:
    """Run the service of the instance's role."""
    instance = sys.argv[sys.argv.index("--instance") + 1]
    role = instance.rpartition("-")[0]
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    file = run_dir / "altered.json"
    changes = json.loads(file.read_text()).get(instance, {}) if file.exists() else {}
    name_short_prompts()
    if role in ("prefill", "decode"):
        poison_the_engine(run_dir, instance)
        redirect_peers(changes.get("redirect", {}))
        if "states" in changes:
            state_context(changes["states"])
        if changes.get("separate"):
            separate_pages()
        if changes.get("early_ranks"):
            from tests.support.clusters import early_ranks

            early_ranks.install(sys.argv)
        engine_gate.install(run_dir, instance)
    elif role == "router":
        be_patient()
    sys.argv += changes.get("arguments", [])
    runpy.run_module(f"services.{role}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
