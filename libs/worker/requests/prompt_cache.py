"""Prompts that this worker was sent, so that the next one need only name the beginning they share. Pure.

A prompt's full blocks are kept as runs: a run is what a prompt had beyond one that was known, so that a turn
of a conversation adds its own blocks, and prompts with one beginning share its runs. Runs that only one goes
on from, and are not much longer than that one, join it: of a conversation of thousands of turns a dozen are
left, and a block is moved some log2(n) times. The chain hash of any block finds the prompt up to there
(docs/block-hash.md). Each tenant, by its salt, has a table of its own: no hash of another tenant's is found,
whoever names it.

Memory is bounded for each tenant and in all. Where it is short in all, tenants that were not heard of for
some minutes give way first, and then those who hold most, so that nobody's many prompts push out another's
few. A run is always used more lately than those that go on from it, so the least recently used run is one
that nothing goes on from, and what is known of a block is known of all blocks before it.
"""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from libs.common import service_bounds
from libs.common.block_hash import TokenArray

_RUN_BYTES = 500  # objects around the data
_BLOCK_BYTES = 160  # a block's hash and its place in the table
# A run of more than this share of a tenant's bound would push out all others, and is not kept.
_LARGEST_SHARE = 0.5
# A run joins the one that goes on from it unless it is more than this many times as long.
_JOINED_RATIO = 2
# A tenant that was not heard of for this long gives way to all others, however little it has.
_IDLE_S = 600.0
# Who holds most is looked for among this many tenants, those heard of least lately.
_MOST_COMPARED = 64


class _Run:
    """Full blocks `first_block` and on of a prompt; those before them are in `parent`. `followers`: runs of
    which this is the parent."""

    __slots__ = ("first_block", "followers", "hashes", "ids", "n_bytes", "parent")

    def __init__(
        self, parent: _Run | None, first_block: int, ids: TokenArray, hashes: tuple[bytes, ...]
    ) -> None:
        self.parent = parent
        self.first_block = first_block
        self.followers = 0
        self.ids = ids
        self.hashes = hashes
        self.n_bytes = _RUN_BYTES + ids.nbytes + _BLOCK_BYTES * len(hashes)


@dataclass(slots=True)
class _Tenant:
    """`runs`: by the hashes of their blocks. `used`: least recently used first. `heard_s`: when it was last
    used at all."""

    runs: dict[bytes, _Run] = field(default_factory=dict)
    used: OrderedDict[_Run, None] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    heard_s: float = 0.0

    def touch(self, run: _Run | None) -> None:
        """It is used, and with it all that it goes on from."""
        while run is not None:
            self.used.move_to_end(run)
            run = run.parent


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt: all ids of its full blocks, in parts, and the hashes of these."""

    ids: Sequence[TokenArray] = ()
    hashes: Sequence[bytes] = ()


class PromptCache:
    """See the module's text. Not thread-safe."""

    def __init__(
        self,
        *,
        block_tokens: int,
        max_bytes: int = service_bounds.MAX_PROMPT_MEMORY_BYTES,
        max_tenant_bytes: int = service_bounds.MAX_TENANT_PROMPT_MEMORY_BYTES,
        least_tokens: int = service_bounds.LEAST_NAMED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._largest_run_bytes = _LARGEST_SHARE * min(max_tenant_bytes, max_bytes)
        self._least_tokens = least_tokens
        self._clock = clock
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # heard of least lately first
        self._n_bytes = 0
        self.recalled = 0  # prefixes found
        self.unknown = 0

    @property
    def n_bytes(self) -> int:
        """All that is kept, about."""
        return self._n_bytes

    def tenant_bytes(self, salt: bytes) -> int:
        """What is kept for a tenant."""
        tenant = self._tenants.get(salt)
        return tenant.n_bytes if tenant is not None else 0

    def recall(self, salt: bytes, block_hash: bytes, *, blocks: int) -> Prefix | None:
        """The `blocks` blocks of this tenant's of which the last has this hash; None: not remembered."""
        tenant = self._tenants.get(salt) or _Tenant()
        run = tenant.runs.get(block_hash)
        last = blocks - run.first_block - 1 if run is not None else -1
        if run is None or not 0 <= last < len(run.hashes) or run.hashes[last] != block_hash:
            self.unknown += 1
            return None
        self.recalled += 1
        tenant.touch(run)
        ids: list[TokenArray] = []
        hashes: list[tuple[bytes, ...]] = []
        at: _Run | None = run
        while at is not None:
            n_blocks = blocks - at.first_block
            ids.append(at.ids[: n_blocks * self._block_tokens])
            hashes.append(at.hashes[:n_blocks])
            blocks, at = at.first_block, at.parent
        return Prefix(ids[::-1], [block for part in hashes[::-1] for block in part])

    def remember(self, salt: bytes, ids: TokenArray, hashes: Sequence[bytes]) -> None:
        """A prompt, and the verified hashes of its full blocks. Only blocks that are not known cost memory
        and time."""
        if len(ids) < self._least_tokens or not hashes:
            return
        tenant = self._tenants.get(salt) or _Tenant()
        n_known = _known(tenant, hashes)
        parent = tenant.runs[hashes[n_known - 1]] if n_known else None
        if n_known < len(hashes):
            fresh = ids[n_known * self._block_tokens : len(hashes) * self._block_tokens].copy()
            run = _Run(parent, n_known, fresh, tuple(hashes[n_known:]))
            if run.n_bytes > self._largest_run_bytes:
                return
            self._tenants[salt] = tenant
            parent = self._add(tenant, self._joined(tenant, run))
        tenant.touch(parent)
        tenant.heard_s = self._clock()
        self._tenants.move_to_end(salt)
        while tenant.n_bytes > self._max_tenant_bytes:
            self._forget_oldest(salt)
        while self._n_bytes > self._max_bytes:
            self._forget_oldest(self._who_gives_way())

    def _joined(self, tenant: _Tenant, run: _Run) -> _Run:
        """A new run with those before it that it may as well be one with."""
        parts = [run]
        at, n_blocks, n_bytes = run.parent, len(run.hashes), run.n_bytes
        while at is not None and not at.followers and len(at.hashes) <= _JOINED_RATIO * n_blocks:
            n_bytes += at.n_bytes
            if at.first_block + len(at.hashes) > parts[-1].first_block or n_bytes > self._largest_run_bytes:
                break  # prompts part within it, or it would be too long to be kept
            n_blocks += len(at.hashes)
            parts.append(at)
            self._forget(tenant, at)
            at = at.parent
        if len(parts) == 1:
            return run
        parts.reverse()
        hashes = tuple(block for part in parts for block in part.hashes)
        return _Run(at, parts[0].first_block, np.concatenate([part.ids for part in parts]), hashes)

    def _add(self, tenant: _Tenant, run: _Run) -> _Run:
        tenant.runs.update(dict.fromkeys(run.hashes, run))
        tenant.used[run] = None
        if run.parent is not None:
            run.parent.followers += 1
        tenant.n_bytes += run.n_bytes
        self._n_bytes += run.n_bytes
        return run

    def _forget(self, tenant: _Tenant, run: _Run) -> None:
        """It is not counted any more; its hashes are left to be given to another run."""
        del tenant.used[run]
        if run.parent is not None:
            run.parent.followers -= 1
        tenant.n_bytes -= run.n_bytes
        self._n_bytes -= run.n_bytes

    def _who_gives_way(self) -> bytes:
        salt, tenant = next(iter(self._tenants.items()))
        if self._clock() - tenant.heard_s >= _IDLE_S:
            return salt
        return max(islice(self._tenants, _MOST_COMPARED), key=lambda of: self._tenants[of].n_bytes)

    def _forget_oldest(self, salt: bytes) -> None:
        tenant = self._tenants[salt]
        run = next(iter(tenant.used))
        self._forget(tenant, run)
        for block_hash in run.hashes:
            del tenant.runs[block_hash]
        if not tenant.used:
            del self._tenants[salt]


def _known(tenant: _Tenant, hashes: Sequence[bytes]) -> int:
    """How many leading blocks are known."""
    if hashes[-1] in tenant.runs:
        return len(hashes)
    return bisect.bisect_left(hashes, True, key=lambda block_hash: block_hash not in tenant.runs)
