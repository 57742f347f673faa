"""After a fault is lifted every link carries again within the promised time, whatever had failed before."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.backoff import CHANNEL_JITTER, CHANNEL_PAUSE_MS, HEAL_S, LONGEST_PAUSE_S, Backoff
from libs.common.dial import CHANNEL_OPTIONS
from libs.common.etcd.client import _OPTIONS as ETCD_OPTIONS

ROOT = Path(__file__).parents[2]
# A retry loop of ours over a channel of gRPC: a call fails at once while the channel waits.
CHANNEL_S = CHANNEL_PAUSE_MS[1] / 1e3 * (1 + CHANNEL_JITTER)


@given(
    failed=st.lists(st.floats(0, 1), max_size=30),
    longest_s=st.floats(0.1, LONGEST_PAUSE_S),
    lifted_share=st.floats(0, 1),
    channel_s=st.floats(0, CHANNEL_S),
)
def test_a_link_heals_in_time(
    failed: list[float], longest_s: float, lifted_share: float, channel_s: float
) -> None:
    """The fault is lifted somewhere in the last pause, and the channel still waits for up to its longest
    time: the first attempt after that carries."""
    backoff = Backoff(longest_s=longest_s)
    for jitter in failed:
        backoff.pause_s(jitter)
    now_s = backoff.pause_s() * (1 - lifted_share)
    while now_s < channel_s:  # the call fails at once: the channel has not tried again yet
        now_s += backoff.pause_s()
    assert now_s <= HEAL_S
    backoff.succeeded()
    assert backoff.pause_s() == 0.1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_pauses_rise_to_the_longest_and_no_further(jitters: list[float]) -> None:
    backoff = Backoff(first_s=0.2, longest_s=1.5)
    full = 0.2
    for jitter in jitters:
        assert full / 2 <= backoff.pause_s(jitter) <= full <= 1.5
        full = min(2 * full, 1.5)


@pytest.mark.parametrize(("first_s", "longest_s"), [(0.0, 1.0), (2.0, 1.0), (0.1, LONGEST_PAUSE_S + 0.1)])
def test_a_backoff_that_heals_too_late_is_none(first_s: float, longest_s: float) -> None:
    with pytest.raises(ValueError):
        Backoff(first_s=first_s, longest_s=longest_s)


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, ETCD_OPTIONS], ids=["workers", "etcd"])
def test_channels_wait_no_longer_than_they_may(options: list[tuple[str, int | str]]) -> None:
    named = {name: int(value) for name, value in options if name.endswith("backoff_ms")}
    assert named["grpc.max_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]
    assert named["grpc.initial_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]
    assert named["grpc.min_reconnect_backoff_ms"] <= CHANNEL_PAUSE_MS[1]


def constants(node: ast.stmt) -> Iterator[tuple[str, float]]:
    """Names and numbers of an assignment, `A = 1.0` or `A, B = 1.0, 2.0`."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    value = getattr(node, "value", None)
    pairs: list[tuple[object, object]] = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for name, number in pairs:
        found = number.value if isinstance(number, ast.Constant) else None
        if isinstance(name, ast.Name) and isinstance(found, int | float):
            yield name.id, float(found)


def test_no_other_retry_pauses_longer() -> None:
    """Constants of the product that say how long something is left alone after it failed, in seconds."""
    late = {}
    for file in [*(ROOT / "libs").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for node in ast.parse(file.read_text()).body:
            for name, value in constants(node):
                pauses = any(part in name for part in ("RETRY_S", "BACK_OFF_S", "PAUSE_S"))
                if pauses and value > LONGEST_PAUSE_S:
                    late[f"{file.relative_to(ROOT)}: {name}"] = value
    assert late == {
        # Not links: a full disk, a process that ends as soon as it is started, and a worker that says it does
        # not serve events.
        "services/kvstore/disk_tier.py: FULL_RETRY_S": 5.0,
        "services/kvstore/pool_client.py: MAX_PAUSE_S": 5.0,
        "services/router/block_feed.py: _UNSERVED_RETRY_S": 30.0,
    }
