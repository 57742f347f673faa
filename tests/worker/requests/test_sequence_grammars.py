"""The constraints of a worker's sequences: by tenant, compiled beside the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from libs.engine.step.types import SequenceSpec
from libs.worker.requests.sequence_grammars import SequenceGrammars
from slipstream.sampling import OutputConstraint, SamplingParams

MODEL_DIR = Path(__file__).parents[3] / "models" / "slipstream-mini"


def spec(salt: bytes) -> SequenceSpec:
    sampling = SamplingParams(constraint=OutputConstraint('start: "a"\n'))
    return SequenceSpec("s", np.ones(1, dtype=np.uint32), sampling, salt=salt)


async def test_sequences_of_two_tenants_share_no_grammar() -> None:
    grammars = SequenceGrammars(MODEL_DIR, vocab_size=1536)
    made = [await grammars.begin(spec(salt)) for salt in (b"anna", b"bert", b"anna")]
    assert all(made)
    assert len(grammars._factory.grammars) == 2
    grammars.close()
