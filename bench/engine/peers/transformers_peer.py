"""transformers' DeepseekV3ForCausalLM as it loads the checkpoint itself; attention by SDPA."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bench.engine.peers.child import PeerOptions


def time_prefill_s(model: Any, ids: Any, clock: Callable[[], float]) -> float:
    """Time of one pass over token ids [1, T], to the first token."""
    start = clock()
    model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
    return clock() - start


def time_decode_s(model: Any, ids: Any, output_tokens: int, clock: Callable[[], float]) -> float:
    """Time of greedy decode behind token ids [B, T], one pass a token; the prompt's pass does not count."""
    output = model(ids, use_cache=True, logits_to_keep=1)
    start = clock()
    for _ in range(output_tokens - 1):
        ids = output.logits[:, -1:].argmax(-1)
        output = model(ids, past_key_values=output.past_key_values, use_cache=True)
    output.logits[:, -1].argmax(-1)
    return clock() - start


class TransformersPeer:
    """Greedy generation over transformers' own cache, one forward pass a token."""

    def __init__(self, options: PeerOptions) -> None:
        import torch
        import transformers

        self.version = f"transformers {transformers.__version__}"
        torch.set_num_threads(options.threads)
        self._torch = torch
        stated = json.loads((options.model_dir / "config.json").read_text(encoding="utf-8"))
        stated.pop("model_type", None)  # transformers does not register kimi_k2
        self._model: Any = transformers.DeepseekV3ForCausalLM.from_pretrained(
            options.model_dir,
            config=transformers.DeepseekV3Config(**stated),
            dtype=getattr(torch, options.dtype),
            attn_implementation="sdpa",
        )

    @property
    def dtype(self) -> str:
        """torch's name of the dtype of the weights."""
        return str(self._model.lm_head.weight.dtype).removeprefix("torch.")

    def prefill_s(self, prompt: list[int], clock: Callable[[], float]) -> float:
        with self._torch.inference_mode():
            return time_prefill_s(self._model, self._torch.tensor([prompt]), clock)

    def decode_s(self, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> float:
        with self._torch.inference_mode():
            return time_decode_s(self._model, self._torch.tensor(prompts), output_tokens, clock)


def load(options: PeerOptions) -> TransformersPeer:
    """The checkpoint in transformers."""
    return TransformersPeer(options)
