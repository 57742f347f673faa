"""The constraints of a worker's sequences: by tenant, compiled beside the engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libs.engine.step.types import SequenceSpec
from libs.worker.requests.sequence_grammars import SequenceGrammars
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.sampling import OutputConstraint, SamplingParams

MODEL_DIR = Path(__file__).parents[3] / "models" / "slipstream-mini"


def spec(salt: bytes, text: str = "a") -> SequenceSpec:
    sampling = SamplingParams(constraint=OutputConstraint(f'start: "{text}"\n'))
    return SequenceSpec("s", np.ones(1, dtype=np.uint32), sampling, salt=salt)


async def test_sequences_of_two_tenants_share_no_grammar() -> None:
    grammars = SequenceGrammars(MODEL_DIR, vocab_size=1536)
    made = [await grammars.begin(spec(salt)) for salt in (b"anna", b"bert", b"anna")]
    assert all(made)
    assert len(grammars._factory.grammars) == 2
    grammars.close()


async def test_slow_grammars_of_one_tenant_hold_up_no_other_tenant() -> None:
    grammars, may_end = SequenceGrammars(MODEL_DIR, vocab_size=1536), threading.Event()
    make, begun = grammars._factory.make, list[bytes]()

    def make_slowly(*given: Any, salt: bytes, max_tokens: int) -> Any:
        begun.append(salt)
        if salt == b"anna":
            assert may_end.wait(60)
        return make(*given, salt=salt, max_tokens=max_tokens)

    grammars._factory.make = make_slowly  # type: ignore[assignment, method-assign]
    try:
        slow = [grammars.begin(spec(b"anna", f"a{index}")) for index in range(8)]
        async with asyncio.timeout(60):
            assert await grammars.begin(spec(b"bert"))
        assert begun == [b"anna", b"anna", b"bert"]
        for ended in slow[2:5]:
            ended.cancel()
        del slow[2:5]
        may_end.set()
        async with asyncio.timeout(60):
            assert all(await asyncio.gather(*slow))
        assert begun.count(b"anna") == len(slow)
    finally:
        may_end.set()
        grammars.close()


async def test_the_tenant_that_runs_the_fewest_goes_before_those_that_wait_longer() -> None:
    grammars, may_end = SequenceGrammars(MODEL_DIR, vocab_size=1536), threading.Event()
    make, begun = grammars._factory.make, list[bytes]()

    def make_slowly(*given: Any, salt: bytes, max_tokens: int) -> Any:
        begun.append(salt)
        if len(begun) > 1:
            assert may_end.wait(60)
        return make(*given, salt=salt, max_tokens=max_tokens)

    grammars._factory.make = make_slowly  # type: ignore[assignment, method-assign]
    try:
        salts = (b"anna", b"anna", b"bert", b"bert", b"bert", b"carl")
        made = [grammars.begin(spec(salt, f"a{index}")) for index, salt in enumerate(salts)]
        async with asyncio.timeout(60):
            assert await made[0]
            while len(begun) < 4:
                await asyncio.sleep(0.001)
        assert begun[3] == b"carl"
    finally:
        may_end.set()
        grammars.close()


async def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    grammars = SequenceGrammars(None, vocab_size=1536)
    await grammars.warm_up()
    with pytest.raises(FailedPrecondition, match="no tokenizer"):
        await grammars.begin(spec(b"anna"))
    grammars.close()


async def test_a_failure_after_its_sequence_ended_is_no_error_of_the_loop() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    grammars = SequenceGrammars(None, vocab_size=1536)
    failing = grammars.begin(spec(b"anna"))
    await asyncio.wait([failing])
    del failing
    grammars.begin(spec(b"anna")).cancel()
    await asyncio.sleep(0)
    gc.collect()
    grammars.close()
    assert not errors


async def test_a_grammar_that_fails_or_is_dropped_frees_its_thread() -> None:
    grammars = SequenceGrammars(MODEL_DIR, vocab_size=1536)
    for _ in range(5):
        with pytest.raises(InvalidArgument):
            await grammars.begin(spec(b"anna", "\n"))
    assert await grammars.begin(spec(b"anna"))
    waiting = [grammars.begin(spec(b"anna", f"b{index}")) for index in range(8)]
    grammars.close()
    assert all(made.cancelled() for made in waiting[4:])
