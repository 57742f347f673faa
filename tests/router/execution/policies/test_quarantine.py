"""Quarantine finds the request that crashes workers after few crashes and fails no other request."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.exit_reports import CrashedAttempts, WorkerExit
from libs.common.service_bounds import MAX_QUARANTINED, QUARANTINE_S
from services.router.execution.policies.quarantine import (
    ALONE_STRIKES,
    PROOF_TOKENS,
    REPEAT_TOKENS,
    STRIKES,
    Quarantine,
    Suspect,
)
from slipstream.errors import Quarantined


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lone_request_is_quarantined_at_its_second_crash() -> None:
    quarantine, poison = Quarantine(Clock()), Suspect(b"poison")
    quarantine.begin(poison, ["a"])
    quarantine.end(poison, crashed="a")
    quarantine.begin(poison, ["b"])
    with pytest.raises(Quarantined):
        quarantine.end(poison, crashed="b")
    assert quarantine.unproven == 0


def test_a_request_that_progressed_between_crashes_is_not_quarantined() -> None:
    """Its workers crash at token 5 and at token 15; a crashing request would crash at the same token."""
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    for worker, tokens in (("a", 5), ("b", REPEAT_TOKENS + 1)):
        quarantine.begin(request, [worker])
        quarantine.observe(request, tokens)
        quarantine.end(request, crashed=worker)
    quarantine.begin(request, ["c"])
    quarantine.observe(request, PROOF_TOKENS)
    quarantine.end(request)
    assert request.strikes == 0


def test_a_third_crash_quarantines_despite_progress() -> None:
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    for worker in "ab":
        quarantine.begin(request, [worker])
        quarantine.observe(request, PROOF_TOKENS - 1)
        quarantine.end(request, crashed=worker)
    quarantine.begin(request, ["c"])
    quarantine.observe(request, PROOF_TOKENS - 1)
    with pytest.raises(Quarantined):
        quarantine.end(request, crashed="c")


@given(kills_at=st.integers(0, PROOF_TOKENS - 1), lost=st.lists(st.integers(0, 4), min_size=2, max_size=2))
def test_a_lone_crashing_request_is_found_at_its_second_crash(kills_at: int, lost: list[int]) -> None:
    """The crash may come at any token, and any number of the last tokens may be lost."""
    quarantine, killer, done = Quarantine(Clock()), Suspect(b"killer"), 0
    for worker, missing in enumerate(lost):
        quarantine.begin(killer, [str(worker)])
        fresh = max(kills_at - missing - done, 0)
        quarantine.observe(killer, fresh)
        done += fresh
        if worker == 0:
            quarantine.end(killer, crashed=str(worker))
        else:
            with pytest.raises(Quarantined):
                quarantine.end(killer, crashed=str(worker))


def test_a_quarantined_request_is_refused_for_a_time() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    for number in range(MAX_QUARANTINED + 1):
        poison = Suspect(f"poison {number}".encode(), ("v",))
        quarantine.begin(poison, ["w"])
        with pytest.raises(Quarantined):
            quarantine.end(poison, crashed="w")
    quarantine.check(b"poison 0")  # the oldest entry is removed: memory is bounded
    with pytest.raises(Quarantined):
        quarantine.check(b"poison 1")
    clock.now_s += QUARANTINE_S
    quarantine.check(b"poison 1")


def test_a_stream_with_enough_tokens_gets_no_strike() -> None:
    quarantine, stream = Quarantine(Clock()), Suspect(b"stream")
    for worker in ("a", "b", "c"):
        quarantine.begin(stream, [worker])
        quarantine.observe(stream, PROOF_TOKENS)
        quarantine.end(stream, crashed=worker)
    assert stream.strikes == 0


def test_the_crash_of_a_worker_after_the_request_left_it_is_no_strike() -> None:
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    quarantine.begin(request, ["prefill", "decode"])
    quarantine.leave_workers(request, ["prefill"])
    quarantine.end(request, crashed="prefill")
    assert request.strikes == 0
    assert quarantine.unproven == 0


def test_suspects_start_one_at_a_time_on_a_worker() -> None:
    quarantine = Quarantine(Clock())
    first, second = Suspect(b"1", ("v",)), Suspect(b"2", ("v",))
    quarantine.begin(first, ["a"])
    assert not quarantine.may_begin(second, ["a"])
    assert quarantine.may_begin(second, ["b"])
    assert quarantine.may_begin(Suspect(b"3"), ["a"])
    quarantine.observe(first, 1)
    assert quarantine.may_begin(second, ["a"])
    second.struck_by = ("v", "w")
    assert not quarantine.may_begin(second, ["a"])
    quarantine.observe(first, PROOF_TOKENS)
    assert quarantine.may_begin(second, ["a"])


@given(
    innocents=st.integers(0, 12),
    kills_at=st.integers(0, 60),
    lost=st.integers(0, 4),
    progress=st.lists(st.integers(0, 40), min_size=12, max_size=12),
)
def test_a_crashing_request_among_others_is_found(
    innocents: int, kills_at: int, lost: int, progress: list[int]
) -> None:
    """Workers crash when the killer emits token `kills_at`; up to `lost` of its last tokens are lost.

    All requests run together at first. Afterwards each one starts as soon as it may, and gets a token a step.
    """
    quarantine = Quarantine(Clock())
    killer = Suspect(b"killer")
    others = [Suspect(f"innocent {n}".encode()) for n in range(innocents)]
    done = {suspect: 0 for suspect in (killer, *others)}
    for suspect, tokens in zip(others, progress, strict=False):
        done[suspect] = tokens
    deaths, running, killed = 0, set[Suspect](), False
    worker = "w0"
    for _step in range(5000):
        for suspect in done:
            waits = suspect not in running and not (suspect is killer and killed)
            if waits and quarantine.may_begin(suspect, [worker]):
                quarantine.begin(suspect, [worker])
                running.add(suspect)
        dies = killer in running and done[killer] >= kills_at
        if not dies:
            for suspect in running:
                done[suspect] += 1
                quarantine.observe(suspect, 1)
            if killed and all(suspect.strikes == 0 for suspect in others):
                break
            continue
        deaths += 1
        done[killer] -= min(lost, done[killer])
        for suspect in sorted(running, key=lambda suspect: suspect is killer):
            try:
                quarantine.end(suspect, crashed=worker)
            except Quarantined:
                assert suspect is killer
                killed = True
        running.clear()
        worker = f"w{deaths}"
        if killed and not others:
            break
    assert killed
    assert deaths <= 4
    if innocents == 0:
        assert deaths <= 3  # the first crash may have come after PROOF_TOKENS tokens


@given(
    ends=st.lists(st.tuples(st.booleans(), st.integers(0, PROOF_TOKENS - 1), st.booleans()), max_size=12),
)
def test_a_worker_killed_from_outside_is_no_strike(ends: list[tuple[bool, int, bool]]) -> None:
    """`ends`: whether the request crashed the worker, its tokens there, whether the report comes at once.

    The request is quarantined after two crashes without progress, or after three.
    """
    quarantine, request, broken = Quarantine(Clock()), Suspect(b"request"), 0
    for number, (broke, tokens, at_once) in enumerate(ends):
        worker = f"w{number}"
        quarantine.begin(request, [worker])
        quarantine.observe(request, tokens)
        if not broke and (at_once or quarantine.is_repeated_strike(request, worker)):
            quarantine.record_exit(worker, WorkerExit.KILLED)
        broken += broke
        try:
            quarantine.end(request, crashed=worker)
        except Quarantined:
            assert broke and (broken == 3 or (broken == 2 and tokens <= REPEAT_TOKENS))
            break
        assert broken < 2 or (broken == 2 and (tokens > REPEAT_TOKENS or not broke))
        if not broke:
            quarantine.record_exit(worker, WorkerExit.KILLED)  # the report comes at the latest now
    assert quarantine.unproven == 0


def test_a_crash_under_a_hedge_is_a_strike() -> None:
    """The hedge's worker crashes and the first attempt continues; the next crash is the second strike."""
    quarantine, poison = Quarantine(Clock()), Suspect(b"poison")
    quarantine.begin(poison, ["prefill-0", "decode-0"])
    quarantine.add_workers(poison, ["prefill-1", "decode-0"])
    quarantine.leave_workers(poison, ["prefill-1"], crashed="prefill-1")
    assert poison.strikes == 1
    assert set(poison.workers) == {"prefill-0", "decode-0"}
    assert quarantine.is_repeated_strike(poison, "prefill-0")
    with pytest.raises(Quarantined):
        quarantine.end(poison, crashed="prefill-0")
    assert quarantine.unproven == 0


def test_a_slower_hedge_is_no_strike() -> None:
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    quarantine.begin(request, ["prefill-0", "decode-0"])
    quarantine.add_workers(request, ["prefill-1", "decode-1"])
    quarantine.leave_workers(request, ["prefill-0", "decode-0"])
    assert (request.strikes, set(request.workers)) == (0, {"prefill-1", "decode-1"})
    quarantine.end(request)
    assert quarantine.unproven == 0


def test_one_crash_under_two_attempts_is_one_strike() -> None:
    """The decode worker of an attempt and its hedge crashes, and both attempts fail."""
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    quarantine.begin(request, ["prefill-0", "decode-0"])
    quarantine.add_workers(request, ["prefill-1", "decode-0"])
    quarantine.leave_workers(request, ["prefill-1"], crashed="decode-0")
    assert not quarantine.is_repeated_strike(request, "decode-0")
    quarantine.end(request, crashed="decode-0")
    assert (request.strikes, request.struck_by) == (1, ("decode-0",))
    assert quarantine.unproven == 0


def test_a_suspect_that_ends_before_the_exit_report_still_shares_the_crash() -> None:
    """One of two suspects is cancelled while the exit report for the other one is pending."""
    quarantine = Quarantine(Clock())
    poison, innocent = Suspect(b"poison", struck_by=("v",)), Suspect(b"innocent", struck_by=("v",))
    for suspect in (poison, innocent):
        quarantine.begin(suspect, ["a"])
    quarantine.record_crash("a")
    quarantine.end(poison)
    quarantine.end(innocent, crashed="a")
    assert innocent.strikes == 2
    assert quarantine.unproven == 0


def test_a_repeated_request_begins_with_the_strikes_of_its_content() -> None:
    """The first one was cancelled after its strike."""
    now_s = [0.0]
    quarantine, first = Quarantine(lambda: now_s[0]), Suspect(b"poison")
    quarantine.begin(first, ["a"])
    quarantine.end(first, crashed="a")
    assert quarantine.has_suspects
    again, late = Suspect(b"poison"), Suspect(b"poison")
    quarantine.restore_strikes(again)
    assert again.strikes == 1
    quarantine.begin(again, ["b"])
    with pytest.raises(Quarantined):
        quarantine.end(again, crashed="b")
    now_s[0] = QUARANTINE_S
    quarantine.restore_strikes(late)
    assert late.strikes == 0


@pytest.mark.parametrize("way", ["proven", "ended", "killed"])
def test_strikes_of_a_content_are_cleared(way: str) -> None:
    quarantine, request, again = Quarantine(lambda: 0.0), Suspect(b"request"), Suspect(b"request")
    quarantine.begin(request, ["a"])
    quarantine.end(request, crashed="a")
    if way == "killed":
        quarantine.record_exit("a", WorkerExit.KILLED)
    else:
        quarantine.begin(request, ["b"])
        if way == "proven":
            quarantine.observe(request, PROOF_TOKENS)
        else:
            quarantine.clear_strikes(request)
        quarantine.end(request)
    quarantine.restore_strikes(again)
    assert again.strikes == 0


def test_what_counts_no_longer_leaves_no_suspects() -> None:
    """The router hashes the content of each request while there are any."""
    now_s = [0.0]
    quarantine, struck, refused = Quarantine(lambda: now_s[0]), Suspect(b"struck"), Suspect(b"refused")
    for worker in ("a", "b"):
        quarantine.begin(refused, [worker])
        with pytest.raises(Quarantined) if worker == "b" else contextlib.nullcontext():
            quarantine.end(refused, crashed=worker)
    now_s[0] = QUARANTINE_S / 4
    assert quarantine.has_suspects
    now_s[0] = QUARANTINE_S / 2
    for worker in ("c", "d"):  # its strikes count from the last one on
        quarantine.begin(struck, [worker])
        quarantine.observe(struck, PROOF_TOKENS - 1)
        quarantine.end(struck, crashed=worker)
        struck_before = Suspect(b"struck before")
        if worker == "c":
            quarantine.begin(struck_before, ["e"])
            quarantine.end(struck_before, crashed="e")
            now_s[0] = 0.75 * QUARANTINE_S
    for passed, kept in ((1.0, 2), (1.5, 1), (1.75, 0)):
        now_s[0] = passed * QUARANTINE_S
        assert quarantine.has_suspects == (kept > 0) and len(quarantine._struck) == kept
    assert not quarantine._refused_until_s


def test_kept_strikes_are_bounded() -> None:
    quarantine = Quarantine(lambda: 0.0)
    for number in range(MAX_QUARANTINED + 1):
        suspect = Suspect(b"%d" % number)
        quarantine.begin(suspect, ["a"])
        quarantine.end(suspect, crashed="a")
    first, second = Suspect(b"0"), Suspect(b"1")
    quarantine.restore_strikes(first)
    quarantine.restore_strikes(second)
    assert (first.strikes, second.strikes) == (0, 1)


@given(elsewhere=st.builds(CrashedAttempts, st.integers(0, 3), st.integers(0, 1)))
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_crash_that_other_routers_share_blames_no_one_alone(
    is_silent: bool, elsewhere: CrashedAttempts
) -> None:
    """Alone on the worker the second strike decides, the only one with strikes the third, else the fifth."""
    quarantine, request = Quarantine(Clock()), Suspect(b"request")
    for crash in range(1, 6):
        worker = str(crash)
        quarantine.begin(request, [worker])
        is_cause = (
            (crash >= STRIKES and elsewhere.attempts == 0)
            or (crash > STRIKES and not elsewhere.struck)
            or crash >= ALONE_STRIKES
        )
        if is_silent:
            assert quarantine.fell_silent(request, worker)
            assert quarantine.silence_of(worker) == CrashedAttempts(1, struck=crash > 1)
            quarantine.end(request)
            quarantine.silence_ended(worker, crashed=True, elsewhere=elsewhere)
            assert request.is_quarantined is is_cause
        else:
            assert quarantine.record_crash(worker) == CrashedAttempts(1, struck=crash > 1)
            quarantine.record_elsewhere(worker, elsewhere)
            quarantine.record_elsewhere(worker, CrashedAttempts())  # a read that failed
            with pytest.raises(Quarantined) if is_cause else contextlib.nullcontext():
                quarantine.end(request, crashed=worker)
        assert quarantine.unproven == 0
        if is_cause:
            return
    raise AssertionError("it goes on for ever")
