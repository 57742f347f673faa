"""Which crashes are strikes, whose strikes are kept, and who shares the blame."""

from __future__ import annotations

from libs.common.cluster.exit_reports import CrashedAttempts
from services.router.execution.policies.quarantine import PROOF_TOKENS, Quarantine, Suspect


def test_a_hedge_that_is_left_gives_a_strike_only_where_its_worker_crashed() -> None:
    quarantine, request, other = Quarantine(lambda: 0.0), Suspect(b"request"), Suspect(b"other")
    quarantine.begin(request, ["a", "b", "c"])
    quarantine.begin(other, ["b"])
    quarantine.leave_workers(request, ["a"])
    quarantine.leave_workers(request, ["b"], crashed="z")
    assert request.strikes == 0 and not quarantine.is_repeated_strike(request, "c")
    quarantine.add_workers(request, ["b"])
    quarantine.leave_workers(request, ["b"], crashed="b")
    assert request.strikes == 1 and quarantine.is_repeated_strike(request, "c")
    assert quarantine.record_crash("b") == CrashedAttempts(2, 0), "as it was at the crash"
    assert quarantine.may_begin(request, ["b"]), "what runs there has no strikes"


def test_strikes_of_requests_without_content_are_not_kept() -> None:
    quarantine, unnamed, unhurt = Quarantine(lambda: 0.0), Suspect(), Suspect(b"unhurt")
    quarantine.begin(unnamed, ["a"])
    quarantine.end(unnamed, crashed="a")
    quarantine.begin(unhurt, ["b"])
    quarantine.end(unhurt)
    assert unnamed.strikes == 1 and not quarantine.has_suspects


def test_two_requests_with_strikes_share_the_blame_of_a_crash() -> None:
    quarantine, suspects = Quarantine(lambda: 0.0), [Suspect(b"one"), Suspect(b"two"), Suspect(b"new")]
    for number, suspect in enumerate(suspects[:2]):
        for worker in (f"a{number}", f"b{number}"):
            quarantine.begin(suspect, [worker])
            quarantine.observe(suspect, PROOF_TOKENS - 1)
            quarantine.end(suspect, crashed=worker)
    for suspect in suspects:
        quarantine.begin(suspect, ["c"])
    for suspect in suspects:
        quarantine.end(suspect, crashed="c")
    assert [suspect.strikes for suspect in suspects] == [3, 3, 1]
