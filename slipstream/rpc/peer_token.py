"""Tokens by which processes of a cluster authenticate each other where there are no certificates.

A token is text: class, instance, two times, a nonce, its audience, and an HMAC of all of them under a key
that is derived from the cluster secret. The audience is the endpoint that the caller dials: the process that
receives a token cannot use it elsewhere. A process that reads the traffic can replay a token to its audience
for MAX_SKEW_S. Across machines use mTLS.

The two times are the wall clock now and the wall clock at the start plus the time since then. A verifier
compares each with its own two, and one of the four differences must be small. So a wall clock that jumps
under running processes invalidates nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.errors import Unauthenticated
from slipstream.rpc.audience import audience_of
from slipstream.rpc.caller_class import CallerClass, CallerIdentity
from slipstream.rpc.cluster_secret import ClusterSecret

TOKEN_LABEL = "peer-token"
TOKEN_HEADER = "x-slipstream-token"
MAX_SKEW_S = 300
MINT_EVERY_S = 60
MAX_VERIFIED = 1024
MAX_TOKEN_CHARS = 768
_NONCE_BYTES = 8
_INSTANCE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MINTED = (CallerClass.PEER, CallerClass.OPERATOR)


class TwoClocks:
    """The wall clock, and one that starts with it and that no jump of the wall clock moves."""

    def __init__(
        self,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        """`monotonic_s` counts while the machine is suspended, too."""
        self._wall_s, self._monotonic_s = wall_s, monotonic_s
        self._offset_s = wall_s() - monotonic_s()

    def now_s(self) -> tuple[int, int]:
        """The wall clock's time and the steady one's, in seconds since 1970."""
        return int(self._wall_s()), int(self._offset_s + self._monotonic_s())


class TokenMinter:
    """Makes the tokens of one process."""

    def __init__(
        self,
        secret: ClusterSecret,
        instance: str,
        kind: CallerClass = CallerClass.PEER,
        *,
        clocks: TwoClocks | None = None,
    ) -> None:
        """Raises ValueError for an instance name that discovery would refuse, too."""
        if not _INSTANCE.fullmatch(instance) or kind not in _MINTED:
            raise ValueError(f"no token for {kind} {instance!r}")
        self._key = secret.derive(TOKEN_LABEL)
        self._head = f"{kind}:{instance}"
        self._clocks = clocks or TwoClocks()

    def tokens_for(self, endpoint: str) -> CallTokens:
        """The tokens of calls to the server that is dialled at the endpoint."""
        return CallTokens(self, self._clocks, audience_of(endpoint))

    def mint(self, audience: str, now_s: tuple[int, int]) -> str:
        """A new token."""
        nonce = secrets.token_hex(_NONCE_BYTES)
        body = f"{self._head}:{now_s[0]}:{now_s[1]}:{nonce}:{audience}"
        return f"{body}:{_mac(self._key, body)}"


class CallTokens:
    """The tokens of one process for one server; each is used for MINT_EVERY_S."""

    def __init__(self, minter: TokenMinter, clocks: TwoClocks, audience: str) -> None:
        self._minter = minter
        self._clocks = clocks
        self._audience = audience
        self._minted_s = (0, 0)
        self._metadata: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that authenticates a call made now."""
        now_s = self._clocks.now_s()
        ages_s = (abs(now_s[0] - self._minted_s[0]), abs(now_s[1] - self._minted_s[1]))
        if max(ages_s) >= MINT_EVERY_S:
            self._metadata = ((TOKEN_HEADER, self._minter.mint(self._audience, now_s)),)
            self._minted_s = now_s
        return self._metadata


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The statements of a token of this cluster. The caller judges whether the audience is this server."""

    caller: CallerIdentity
    audience: str
    minted_s: tuple[int, int]


class TokenVerifier:
    """Verifies the tokens of callers. It remembers verified ones, so that a call costs a look-up."""

    def __init__(self, secret: ClusterSecret, *, clocks: TwoClocks | None = None) -> None:
        self._key = secret.derive(TOKEN_LABEL)
        self._clocks = clocks or TwoClocks()
        self._verified: OrderedDict[str, VerifiedToken] = OrderedDict()

    def verify(self, token: str) -> VerifiedToken:
        """The token's content. Raises Unauthenticated for a token that is forged, malformed or too old."""
        known = self._verified.get(token)
        if known is None:
            known = self._verified[token] = self._parse(token)
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        skew_s = min(abs(now - minted) for now in self._clocks.now_s() for minted in known.minted_s)
        if skew_s > MAX_SKEW_S:
            del self._verified[token]
            raise Unauthenticated(
                f"the token of {known.caller} is {skew_s} s from the clock here; {MAX_SKEW_S} s are valid"
            )
        return known

    def _parse(self, token: str) -> VerifiedToken:
        body, _, mac = token[:MAX_TOKEN_CHARS].rpartition(":")
        if not hmac.compare_digest(_mac(self._key, body).encode(), mac.encode("utf-8", "replace")):
            raise Unauthenticated(
                f"{TOKEN_HEADER} is not a token of this cluster: --cluster-secret-file differs"
            )
        kind, instance, wall_s, steady_s, _, audience = body.split(":", 5)  # as `TokenMinter` wrote it
        caller = CallerIdentity(CallerClass(kind), instance)
        return VerifiedToken(caller, audience, (int(wall_s), int(steady_s)))


def claimed_caller(token: str) -> str:
    """The maker of a token, as the token states it; not verified, and fit for a log line."""
    kind, _, rest = token[:MAX_TOKEN_CHARS].partition(":")
    instance = rest.partition(":")[0]
    if kind in _MINTED and _INSTANCE.fullmatch(instance):
        return f"{kind} {instance}"
    return "an unknown caller"


def _mac(key: bytes, body: str) -> str:
    return hmac.digest(key, body.encode("utf-8", "replace"), hashlib.sha256).hex()
