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
    is_refused = sizes.n_ranks > 1 and (has_device or sizes.kv == 3 or (splits and kernels == "triton"))
    assert bool(found) == is_refused
    if not found:
        check_group(sizes, device=device, kernels=kernels, block_tokens=64)
        return
    with pytest.raises(InvalidArgument) as refused:
        check_group(sizes, device=device, kernels=kernels, block_tokens=64)
    assert str(refused.value) == str(found[0])
    assert [each.field for each in found][:1] == ["device" if has_device else "parallel"]


def test_a_split_on_a_device_has_both_reasons_and_machines_are_a_third() -> None:
    found = group_refusals(
        ParallelSizes(tp=2, kv=4), device="cuda", kernels="native", block_tokens=64, n_machines=2
    )
    assert [each.field for each in found] == ["device", "parallel", "parallel"]
    assert "on one machine, not on 2" in found[1].reason and "triton kernels" in found[2].reason
    one = group_refusals(ParallelSizes(), device="cuda", kernels="native", block_tokens=64)
    assert not one


@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2), ParallelSizes(kv=2), ParallelSizes(dp=2, ep=2)])
def test_an_engine_refuses_by_the_same_rule_before_it_loads(tmp_path: Path, sizes: ParallelSizes) -> None:
    write_random_checkpoint(tmp_path, RandomCheckpoint())
    listed = group_refusals(sizes, device="cuda", kernels="triton", block_tokens=64)
    with pytest.raises(InvalidArgument) as refused:
        build_engine(tmp_path, EngineOptions(device="cuda", parallel=sizes))
    assert str(refused.value) == str(listed[0])
