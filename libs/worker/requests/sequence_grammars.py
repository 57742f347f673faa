"""Compiles the grammars of a worker's sequences on its own threads, fairly by tenant."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from libs.common.runtime.futures import pass_outcome
from libs.engine.step.types import SequenceSpec
from libs.structured.constraint import GrammarConstraint
from libs.structured.constraints import ConstraintFactory
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from libs.worker.requests.compile_queue import CompileQueue
from slipstream.errors import FailedPrecondition

_TENANT_THREADS = 2
_COMPILE_THREADS = _TENANT_THREADS + 1

# A sequence's constraint, and the function that makes it.
_Constraint = GrammarConstraint | None
_Work = tuple[asyncio.Future[_Constraint], Callable[[], _Constraint]]


class SequenceGrammars:
    """Makes the constraints of sequences. Call it from one event loop."""

    def __init__(self, model_dir: Path | None, *, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._factory = ConstraintFactory(self._load, n_threads=min(8, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")
        self._n_free = _COMPILE_THREADS
        self._queue: CompileQueue[_Work] = CompileQueue(most_running=_TENANT_THREADS)

    async def warm_up(self) -> None:
        """Load the vocabulary before the first request; this holds the interpreter's lock for up to a second.

        Does nothing for a model without a tokenizer.
        """
        if self._model_dir is not None and (self._model_dir / "tiktoken.model").is_file():
            await asyncio.get_running_loop().run_in_executor(self._threads, self._factory.warm_up)

    def begin(self, spec: SequenceSpec) -> asyncio.Future[GrammarConstraint | None]:
        """Start to make the constraint of a sequence, in the state after its emitted tokens."""
        made: asyncio.Future[_Constraint] = asyncio.get_running_loop().create_future()
        if spec.sampling.constraint is None:
            made.set_result(None)
            return made
        made.add_done_callback(_note_failure)
        make = partial(
            self._factory.make,
            spec.sampling.constraint,
            spec.emitted,
            max_tokens=spec.sampling.max_tokens,
            salt=spec.salt,
        )
        self._queue.add(spec.salt, (made, make))
        self._start()
        return made

    def close(self) -> None:
        """Compile no more. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for made, _ in self._queue.clear():
            made.cancel()

    def _start(self) -> None:
        while self._n_free and (found := self._queue.begin()) is not None:
            tenant, (made, make) = found
            if made.done():  # its sequence has ended
                self._queue.end(tenant)
                continue
            self._n_free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, make)
            running.add_done_callback(partial(self._ended, tenant, made))

    def _ended(
        self, tenant: bytes, made: asyncio.Future[_Constraint], running: asyncio.Future[_Constraint]
    ) -> None:
        self._n_free += 1
        self._queue.end(tenant)
        pass_outcome(running, made)
        self._start()

    def _load(self) -> GrammarVocabulary:
        if self._model_dir is None:
            raise FailedPrecondition("this worker has no tokenizer, which structured output needs")
        return GrammarVocabulary.of(Tokenizer.from_dir(self._model_dir), size=self._vocab_size)


def _note_failure(made: asyncio.Future[GrammarConstraint | None]) -> None:
    """A sequence that ends before its grammar is made awaits nothing; its failure is no error of the loop."""
    if not made.cancelled():
        made.exception()
