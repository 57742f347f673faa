"""Tokens of peers and operators: what is accepted, for how long, and through jumps of the wall clock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from slipstream.errors import Unauthenticated
from slipstream.rpc.caller_class import CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import (
    MAX_SKEW_S,
    MAX_VERIFIED,
    MINT_EVERY_S,
    CallTokens,
    TokenMinter,
    TokenVerifier,
    TwoClocks,
    claimed_caller,
)

SECRET = ClusterSecret(b"the secret of this cluster")
HOUR_S = 3600.0
ENDPOINT = "127.0.0.1:7000"


@dataclass
class Machine:
    """A machine's clocks. `jump` moves the wall clock alone."""

    wall_s: float = 1e9
    monotonic_s: float = 50.0

    def clocks(self) -> TwoClocks:
        return TwoClocks(lambda: self.wall_s, lambda: self.monotonic_s)

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def minter(self, secret: ClusterSecret = SECRET) -> TokenMinter:
        return TokenMinter(secret, "decode-0", clocks=self.clocks())

    def verifier(self) -> TokenVerifier:
        return TokenVerifier(SECRET, clocks=self.clocks())


def text(minter: TokenMinter | CallTokens) -> str:
    tokens = minter.tokens_for(ENDPOINT) if isinstance(minter, TokenMinter) else minter
    ((_, token),) = tokens.metadata()
    return token


def test_a_token_names_its_instance_class_and_audience() -> None:
    machine = Machine()
    token = text(machine.minter())
    verified = machine.verifier().verify(token)
    assert verified.caller == CallerIdentity(CallerClass.PEER, "decode-0")
    assert verified.audience == ENDPOINT
    assert claimed_caller(token) == "peer decode-0"


def test_no_part_of_a_token_can_be_changed() -> None:
    machine = Machine()
    token, verifier = text(machine.minter()), machine.verifier()
    wrong = [
        token.replace(":7000:", ":7001:"),
        token.replace("peer", "operator"),
        token.replace("decode", "router"),
        token[:-1],
        "",
        "a:b",
        "é",
    ]
    wrong += [token[:at] + chr(ord(token[at]) ^ 1) + token[at + 1 :] for at in range(len(token))]
    other = text(machine.minter(ClusterSecret(b"the secret of another one")))
    with pytest.raises(Unauthenticated, match="--cluster-secret-file"):
        verifier.verify(other)
    for forged in wrong:
        with pytest.raises(Unauthenticated):
            verifier.verify(forged)
    assert verifier.verify(token)


def test_a_token_is_valid_for_a_while_and_not_longer() -> None:
    machine = Machine()
    token, verifier = text(machine.minter()), machine.verifier()
    machine.wait(MAX_SKEW_S)
    assert verifier.verify(token)  # also from its cache
    machine.wait(1)
    for verify in (verifier.verify, machine.verifier().verify):
        with pytest.raises(Unauthenticated, match=f"{MAX_SKEW_S + 1} s from the clock here"):
            verify(token)


def test_a_token_is_minted_once_a_minute() -> None:
    machine = Machine()
    tokens = machine.minter().tokens_for(ENDPOINT)
    first = text(tokens)
    machine.wait(MINT_EVERY_S - 1)
    assert text(tokens) == first
    machine.wait(1)
    assert text(tokens) != first


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, 24 * 365 * HOUR_S])
def test_a_wall_clock_that_jumps_invalidates_nothing(jump_s: float) -> None:
    here, there = Machine(), Machine()
    minter, verifier = here.minter(), there.verifier()
    before = text(minter)
    there.wall_s += jump_s  # at the verifier's machine only
    assert verifier.verify(before)
    assert verifier.verify(text(minter))
    here.wall_s += jump_s  # at both, which may be one machine
    assert verifier.verify(before)
    assert verifier.verify(text(minter))
    assert there.verifier().verify(text(minter))  # a process that starts after the jump
    assert verifier.verify(text(here.minter()))


def test_the_memory_of_verified_tokens_is_bounded() -> None:
    machine = Machine()
    verifier = machine.verifier()
    for number in range(MAX_VERIFIED + 10):
        verifier.verify(text(TokenMinter(SECRET, f"decode-{number}", clocks=machine.clocks())))
    assert len(verifier._verified) == MAX_VERIFIED


@pytest.mark.parametrize("instance", ["", "a b", "x" * 129, "a:operator"])
def test_an_instance_name_cannot_break_a_token(instance: str) -> None:
    with pytest.raises(ValueError, match="no token"):
        TokenMinter(SECRET, instance)


@pytest.mark.parametrize(
    "token", ["", "peer", "peer:a b:1", "tenant:anna:1", "peer:x\ny:1", "peer:" + "x" * 200]
)
def test_a_claim_that_no_minter_makes_is_not_repeated(token: str) -> None:
    assert claimed_caller(token) == "an unknown caller"
