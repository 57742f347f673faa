"""The engine's interface: its commands, its outputs, and the records in both.

The engine works on tokens, blocks and pages, without network, text or torch. The calls for a sequence are

    reserve -> (fill)* -> start -> step* -> release

`release` is allowed at any point, more than once, and is the only call that frees pages. A finished sequence
keeps its pages, so that they can be exported, until its release.

Positions count from 0 over `context = prompt ++ emitted ++ generated`. KV at position i exists
once the model has run on token i, so a running sequence has KV for all but its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from libs.common.block_hash import TokenArray
from libs.common.transport.tensor_memory import Tensor
from libs.engine.step.constraint import TokenConstraint
from libs.engine.step.device_rows import FeatureArray
from libs.engine.step.page_parts import PageParts
from libs.engine.step.prompt_scores import PromptScores
from slipstream.errors import SlipstreamError
from slipstream.sampling import SamplingParams as SamplingParams

FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length"]

# Draft heads attend to at most this many previous positions, so only their features are kept and sent.
FEATURE_WINDOW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PageChange:
    """A block that became findable by its hash (`stored`), or no longer is."""

    hash: bytes
    stored: bool


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to run.

    `block_hashes` are those of the full blocks of `prompt` (or of prompt ++ emitted). The engine computes the
    missing ones from `root` and `salt`.
    """

    seq_id: str
    prompt: TokenArray  # u32 [n], n >= 1
    sampling: SamplingParams
    block_hashes: tuple[bytes, ...] = ()
    emitted: tuple[int, ...] = ()  # tokens of earlier attempts, after which generation continues
    prefill_only: bool = False  # stop after the first generated token and keep the pages for export
    root: bytes = bytes(16)  # digest of the fingerprint
    salt: bytes = b""  # of the tenant

    @property
    def context_tokens(self) -> int:
        """The number of tokens whose KV is needed to sample the next one."""
        return len(self.prompt) + len(self.emitted)

    def restorable_hashes(self, block_tokens: int) -> tuple[bytes, ...]:
        """The hashes of the blocks whose KV may come from elsewhere.

        One token at least is computed here, because it gives the first logits. A prompt whose log
        probabilities are wanted is computed whole.
        """
        if self.sampling.prompt_logprobs is not None:
            return ()
        return self.block_hashes[: (self.context_tokens - 1) // block_tokens]


@dataclass(frozen=True, slots=True)
class PageReservation:
    """Pages of a sequence: page k holds positions [k*block_tokens, (k+1)*block_tokens).

    The first `cached_tokens // block_tokens` pages already have their KV and may be shared, so they must not
    be written. `cached_tokens` is a multiple of the block size and less than the context.
    """

    seq_id: str
    pages: tuple[int, ...]
    cached_tokens: int


class TokenLogprobs(NamedTuple):
    """Natural log probabilities at one emitted token under the model, before any sampling parameter."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


class FullBlock(NamedTuple):
    """The hash and the page of a block whose KV is complete."""

    hash: bytes
    page: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one step for one sequence.

    `features` rows belong to positions feature_start, feature_start + 1, ..., and `feature_tokens` are the
    tokens after these positions. Together they extend a drafter's context. A prefill's last step has those of
    the last computed positions, at most FEATURE_WINDOW_TOKENS.
    """

    seq_id: str
    tokens: tuple[int, ...]  # new ones; empty for a prefill chunk that is not the last
    computed_tokens: int  # KV is valid for positions [0, computed_tokens)
    # How many of them were copied since the start from blocks of another running sequence.
    shared_tokens: int = 0
    finish: FinishReason | None = None  # with the last output of a sequence; pages stay until release
    is_closing: bool = False  # the limit has changed a token of it, so that its form ends within the limit
    # The error (OutOfPages, Internal) that ended the sequence, with its last output. Its pages stay until its
    # release.
    failure: SlipstreamError | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token if requested
    scores: PromptScores | None = None  # of the next prompt tokens if requested
    accepted_drafts: int = 0
    proposed_drafts: int = 0
    features: FeatureArray | None = None  # [rows, feature_width]
    feature_tokens: TokenArray | None = None  # [rows]
    feature_start: int = 0
    new_full_blocks: tuple[FullBlock, ...] = ()  # in order; shared ones included


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The constants of an engine."""

    vocab_size: int
    block_tokens: int
    page_bytes: int
    n_pages: int
    hidden_size: int
    max_context_tokens: int
    kv_dtype: str  # "float32" or "bfloat16"
    layout_version: int
    weights_digest: str  # hex, over config and weights headers
    drafter_digest: str = ""  # hex, of the draft head; empty without one
    feature_width: int = 0  # 0 = no draft features
    max_batch: int = 64
    max_draft_tokens: int = 8  # longer drafts are cut


@dataclass(frozen=True, slots=True)
class EngineLedger:
    """The pages and sequences of an engine. pages_free + pages_cached + pages_held == n_pages."""

    pages_free: int
    pages_cached: int  # unreferenced, but findable by hash; evicted when needed
    pages_held: int  # referenced by sequences or pins
    sequences_reserved: int = 0  # reserved, not started
    sequences_prefilling: int = 0
    sequences_decoding: int = 0
    sequences_finished: int = 0  # finished or failed, not released
    pinned_pages: int = 0
    prefill_tokens_waiting: int = 0  # prompt tokens of started sequences that are not computed yet
    decode_context_tokens: int = 0
    pages_awaited: int = 0  # pages that decoding sequences wait for
    launched_pages: int = 0  # held for launched rows and copies, of sequences that are released since
    steps_aborted: int = field(default=0, compare=False)  # since the start; see `Engine.abandon`

    @property
    def room_pages(self) -> int:
        """The number of pages for new sequences."""
        return self.pages_free + self.pages_cached - self.pages_awaited

    @property
    def sequences(self) -> int:
        """The number of sequences that are not released."""
        return (
            self.sequences_reserved
            + self.sequences_prefilling
            + self.sequences_decoding
            + self.sequences_finished
        )


class DeviceBytes(Tensor, Protocol):
    """Memory of a CUDA device: a flat, contiguous uint8 tensor, as are its slices."""

    def cpu(self) -> Any:
        """A copy in the host, made behind the work of the calling thread's stream."""
        ...

    def to(self, device: str, /, *, non_blocking: bool) -> Any:
        """A copy there, made as `cpu` does; `non_blocking`: it may run on when the call returns."""
        ...

    def __getitem__(self, span: slice, /) -> DeviceBytes: ...

    # Any: a tensor accepts only memory of the same kind.
    def __setitem__(self, span: slice, content: Any, /) -> None: ...


class Engine(Protocol):
    """The model on one device group. Synchronous.

    One thread makes all calls. Any thread may call `abandon`, `try_release`, `read_page`, `receive` and
    `want_features`.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def memory(self) -> memoryview | DeviceBytes:
        """All pages as one writable, page-aligned buffer; page p = bytes [p*page_bytes, (p+1)*page_bytes)."""
        ...

    @property
    def memory_address(self) -> int:
        """Address of `memory`'s first byte."""
        ...

    @property
    def page_parts(self) -> PageParts | None:
        """The parts of pages outside of `memory`, which `collect` brings there; None: `memory` has all."""
        ...

    def read_page(self, page: int, *, has_landed: bool = False) -> memoryview:
        """The bytes of a page whose blocks outputs have named: a view of the host's memory, or a copy of a
        device's. Waits for no step that was launched since, but with `page_parts` for the one that runs.

        `has_landed`: a transport wrote the page, and no step. On a device this waits for launched steps, too.
        """
        ...

    def close(self) -> None:
        """End other processes of the model. No other call but of `memory` follows. Idempotent."""
        ...

    def reserve(self, spec: SequenceSpec) -> PageReservation:
        """Reserve pages for the context and one more token, reusing cached prefix blocks.

        Raises OutOfPages (and reserves none; retry later), InvalidArgument (an empty or too long prompt, a
        token outside the vocabulary), FailedPrecondition (the seq_id is in use).
        """
        ...

    def receive(self, seq_id: str, n_tokens: int) -> None:
        """Bring the pages that the next `fill` names from `memory` to where steps read them.

        It copies only with `page_parts`, beside steps, and takes turns with them. Any thread may call it.
        Raises the errors of `fill`; NotFound also for a sequence that is released meanwhile.
        """
        ...

    def fill(self, seq_id: str, n_tokens: int) -> None:
        """Record that the reserved pages have verified KV of positions [cached_tokens, n_tokens).

        Allowed only between reserve and start, with `page_parts` after `receive`; n_tokens never falls.
        Raises NotFound, FailedPrecondition.
        """
        ...

    def start(
        self,
        seq_id: str,
        *,
        first_token: int | None = None,
        features: FeatureArray | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        """Make the sequence runnable.

        Without `first_token` the engine computes the missing part of the context, at least its last token.
        With `first_token`, KV of the whole context must be filled. That token was emitted before, so no
        output has it. `features` of the context's last positions precede those of the first output.
        `constraint` is in the state after the context. Raises NotFound, FailedPrecondition.
        """
        ...

    def step(self, drafts: Mapping[str, Sequence[int]] = ..., *, features: bool = ...) -> list[StepOutput]:
        """Run one forward pass over chunked prefills and all decoding sequences, and verify `drafts`.

        Without `features` no output has any, also where the engine could compute them.

        Any drafts are safe: right ones save steps, and wrong, stale or unknown ones change no token. The
        result is empty if the pass was aborted (see `abandon`).
        """
        ...

    def want_features(self, seq_id: str, *, wanted: bool) -> None:
        """State whether later steps compute features for the sequence, which they do by default.

        A step computes features of all its rows or of none. Any thread may call it. Unknown sequences are
        accepted.
        """
        ...

    def release(self, seq_id: str) -> None:
        """Remove the sequence and release its pages; full blocks stay findable until evicted. Idempotent."""
        ...

    def abandon(self, seq_id: str) -> None:
        """Mark a sequence as cancelled; abort the step in progress if most of its rows are cancelled.

        Any thread may call it. A `release` must follow; only that releases pages. An aborted step changes no
        sequence: those that still run compute the same rows again.
        """
        ...

    def try_release(self, seq_id: str) -> bool:
        """`release` during a step that has no row of the sequence; False when the step has one.

        Any thread may call it. Later commands for the sequence raise NotFound.
        """
        ...

    def exchange(self, seq_id: str, pages: Sequence[int]) -> PageReservation:
        """Replace unfilled pages of a sequence that is reserved and not started.

        The old pages are released: pin them first while a peer may still write to them. Raises OutOfPages,
        and then nothing changes.
        """
        ...

    def pin(self, pages: Sequence[int]) -> None:
        """Keep held pages from reuse after their sequence is released. Counted, see `unpin`."""
        ...

    def pin_blocks(self, blocks: Sequence[FullBlock]) -> tuple[FullBlock, ...]:
        """Pin the pages that have these blocks now. Returns the pinned blocks; see `unpin`.

        Evicted blocks are skipped. If two pages have a block, the one that its hash names is pinned.
        """
        ...

    def poll_block_changes(self) -> Sequence[PageChange]:
        """Blocks that became findable in this cache, or were evicted, since the last call, in order.

        The first call returns all findable blocks. From then on the caller must poll: changes are kept
        until the next call.
        """
        ...

    def unpin(self, pages: Sequence[int], *, evict_first: bool = False) -> None:
        """Undo one `pin` of each page. With `evict_first` the pages are evicted before all others."""
        ...

    def has_work(self) -> bool:
        """Whether any sequence is prefilling or decoding."""
        ...

    def ledger(self) -> EngineLedger:
        """The present pages and sequences."""
        ...
