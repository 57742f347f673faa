"""llama.cpp through `pip install llama-cpp-python gguf`: batches of sequences by its C interface."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.peers.child import PeerOptions
from bench.engine.peers.gguf_file import write_gguf

_BATCH_ROWS = 512  # of one pass, llama.cpp's default


class LlamaCppPeer:
    """One context with a KV cache for the whole batch; the greedy choice is numpy's argmax."""

    def __init__(self, options: PeerOptions) -> None:
        if options.dtype != "bfloat16":
            raise ValueError(f"llama.cpp is measured in bfloat16, not in {options.dtype}")
        import llama_cpp

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._lib: Any = llama_cpp
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(options.model_dir, path)
            self._lib.llama_backend_init()
            settings = self._lib.llama_model_default_params()
            settings.use_mmap = False  # the file goes
            self._model = self._lib.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise RuntimeError("llama.cpp did not load the GGUF file")
        context = self._lib.llama_context_default_params()
        context.n_ctx = options.max_tokens * options.max_batch
        context.n_seq_max = options.max_batch
        context.n_batch = context.n_ubatch = _BATCH_ROWS
        context.n_threads = context.n_threads_batch = options.threads
        self._context = self._lib.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        vocabulary = self._lib.llama_model_get_vocab(self._model)
        self._vocab_size = self._lib.llama_vocab_n_tokens(vocabulary)
        self._batch = self._lib.llama_batch_init(_BATCH_ROWS, 0, 1)

    def prefill_s(self, prompt: list[int], clock: Callable[[], float]) -> float:
        self._clear()
        start = clock()
        self._prefill(prompt, 0)
        return clock() - start

    def decode_s(self, prompts: list[list[int]], output_tokens: int, clock: Callable[[], float]) -> float:
        self._clear()
        tokens = [self._prefill(prompt, sequence) for sequence, prompt in enumerate(prompts)]
        start = clock()
        for step in range(output_tokens - 1):
            rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            tokens = self._decode(rows)
        return clock() - start

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _prefill(self, prompt: list[int], sequence: int) -> int:
        """The first token after a prompt."""
        rows = [(token, i, sequence, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        tokens: list[int] = []
        for begin in range(0, len(rows), _BATCH_ROWS):
            tokens = self._decode(rows[begin : begin + _BATCH_ROWS])
        return tokens[0]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, sequence, whether its next token is wanted); the next tokens."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        return [self._greedy(i) for i, row in enumerate(rows) if row[3]]

    def _greedy(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())


def load(options: PeerOptions) -> LlamaCppPeer:
    """The checkpoint as a GGUF file in llama.cpp."""
    return LlamaCppPeer(options)
