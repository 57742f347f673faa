"""Groups that the engine refuses: the list that planners print, and what a load raises."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.core.build import EngineOptions, build_engine
from libs.engine.parallel.limits import check_group, group_refusals
from libs.engine.parallel.sizes import ParallelSizes
from slipstream.errors import InvalidArgument
from tests.support.random_checkpoint import RandomCheckpoint, write_random_checkpoint

_SIZES = st.builds(ParallelSizes, tp=st.integers(1, 4), pp=st.integers(1, 2), kv=st.integers(1, 4))


@given(_SIZES, st.sampled_from(["cpu", "cuda", "cuda:1"]), st.sampled_from(["native", "torch", "triton"]))
def test_a_group_starts_exactly_where_no_refusal_is_listed(
    sizes: ParallelSizes, device: str, kernels: str
) -> None:
    found = group_refusals(sizes, device=device, kernels=kernels, block_tokens=64)
    has_device, splits = device != "cpu", sizes.kv > 1
    has_triton = has_device or kernels == "triton"
    is_refused = sizes.n_ranks > 1 and (sizes.kv == 3 or (splits and has_triton))
    assert bool(found) == is_refused
    if not found:
        check_group(sizes, device=device, kernels=kernels, block_tokens=64)
        return
    with pytest.raises(InvalidArgument) as refused:
        check_group(sizes, device=device, kernels=kernels, block_tokens=64)
    assert str(refused.value) == str(found[0])
    assert [each.field for each in found][:1] == ["parallel"]


def test_each_reason_of_a_group_on_devices_is_named() -> None:
    found = group_refusals(
        ParallelSizes(dp=2, kv=4),
        device="cuda",
        kernels="native",
        block_tokens=64,
        decode_steps="graphs",
        n_machines=2,
    )
    assert [each.field for each in found] == ["parallel", "decode_steps", "parallel", "parallel"]
    reasons = [each.reason for each in found]
    assert "dp=2" in reasons[0] and "'graphs'" in reasons[1]
    assert "on one machine, not on 2" in reasons[2] and "triton kernels" in reasons[3]
    whole = ParallelSizes(tp=2, pp=2, ep=2)
    assert not group_refusals(whole, device="cuda", kernels="native", block_tokens=64)
    split = ParallelSizes(dp=2)
    assert not group_refusals(split, device="cpu", kernels="native", block_tokens=64, decode_steps="ahead")
    one = group_refusals(ParallelSizes(), device="cuda", kernels="native", block_tokens=64)
    assert not one


@pytest.mark.parametrize("sizes", [ParallelSizes(kv=2), ParallelSizes(dp=2, ep=2)])
def test_an_engine_refuses_by_the_same_rule_before_it_loads(tmp_path: Path, sizes: ParallelSizes) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    listed = group_refusals(sizes, device="cuda", kernels="triton", block_tokens=64)
    with pytest.raises(InvalidArgument) as refused:
        build_engine(tmp_path, EngineOptions(device="cuda", parallel=sizes))
    assert str(refused.value) == str(listed[0])
