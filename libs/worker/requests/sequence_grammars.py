"""The grammars of a worker's sequences: compiled on threads beside the engine's."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from libs.engine.step.types import SequenceSpec
from libs.structured.constraint import GrammarConstraint
from libs.structured.constraints import ConstraintFactory
from libs.structured.vocabulary import GrammarVocabulary
from libs.text.tokenizer import Tokenizer
from slipstream.errors import FailedPrecondition

_COMPILE_THREADS = 2


class SequenceGrammars:
    """Makes the constraints of sequences. Call it from one event loop."""

    def __init__(self, model_dir: Path | None, *, vocab_size: int) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._factory = ConstraintFactory(self._load, n_threads=max(1, min(8, os.cpu_count() or 1)))
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="grammar")

    async def warm_up(self) -> None:
        """Load the vocabulary before the first request; this holds the interpreter's lock for up to a second.

        Does nothing for a model without a tokenizer.
        """
        if self._model_dir is not None and (self._model_dir / "tiktoken.model").is_file():
            await asyncio.get_running_loop().run_in_executor(self._threads, self._factory.warm_up)

    def begin(self, spec: SequenceSpec) -> asyncio.Future[GrammarConstraint | None]:
        """Start to make the constraint of a sequence, in the state after its emitted tokens."""
        loop = asyncio.get_running_loop()
        if spec.sampling.constraint is None:
            done: asyncio.Future[GrammarConstraint | None] = loop.create_future()
            done.set_result(None)
            return done
        made: asyncio.Future[GrammarConstraint | None] = loop.run_in_executor(
            self._threads,
            partial(self._factory.make, spec.sampling.constraint, spec.emitted, salt=spec.salt),
        )
        made.add_done_callback(_note_failure)
        return made

    def close(self) -> None:
        """Compile no more. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> GrammarVocabulary:
        if self._model_dir is None:
            raise FailedPrecondition("this worker has no tokenizer, which structured output needs")
        return GrammarVocabulary.of(Tokenizer.from_dir(self._model_dir), size=self._vocab_size)


def _note_failure(made: asyncio.Future[GrammarConstraint | None]) -> None:
    """A sequence that ends before its grammar is made awaits nothing; its failure is no error of the loop."""
    if not made.cancelled():
        made.exception()
