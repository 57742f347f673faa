"""Every Triton program on a device, in fp32 and in bf16: the tests that the interpreter runs on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.gpu.draw_tests import DrawTests
from tests.engine.kernels.gpu.program_target import ProgramTarget
from tests.engine.kernels.gpu.program_tests import AttentionTests, ProductTests, RowTests

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def target(cuda: str, request: pytest.FixtureRequest) -> ProgramTarget:
    pytest.importorskip("triton", reason="Triton is missing: pip install 'slipstream-server[gpu]'")
    return ProgramTarget(torch.device(cuda), request.param)


class TestAttentionPrograms(AttentionTests):
    pass


class TestRowPrograms(RowTests):
    pass


class TestProductPrograms(ProductTests):
    pass


class TestDraws(DrawTests):
    pass
