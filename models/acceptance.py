"""Acceptance length of a draft head, by replaying the greedy verification on known text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.networks.eagle_network import EagleHead
from models.networks.network import Network
from models.training.batches import Example


@torch.no_grad()
def accepted_lengths(
    head: EagleHead, target: Network, example: Example, features: Tensor, logits: Tensor, *, drafts: int
) -> list[int]:
    """Tokens that each verification step emits (bonus counted) while the assistant's spans are written.

    features [L, 3H], logits [L, V] of the target over `example`. The first token of a span comes from
    prefill. A draft is accepted iff it is the target's argmax; a span ends with its last token. Exact where
    the text is the target's own greedy output; elsewhere it is the replay on that text.
    """
    ids = torch.tensor(example.token_ids)
    # The row before each written token but the last one of its span may have to draft.
    rows = torch.cat([torch.arange(start - 1, end - 2) for start, end in example.spans])
    embedded = F.embedding(F.pad(ids, (0, drafts)), target.embed_tokens.weight)
    hidden = head.unroll(features[:-1], embedded, rows, drafts)
    argmax = F.pad(logits.argmax(-1), (0, drafts + 1), value=-1)
    matches = [head.logits(h).argmax(-1) == argmax[rows + 1 + s] for s, h in enumerate(hidden)]
    leading = torch.stack(matches).int().cumprod(0).sum(0).tolist()
    accepted = dict(zip(rows.tolist(), leading, strict=True))
    lengths = []
    for start, end in example.spans:
        last = start
        while last < end - 1:
            emitted = min(accepted[last - 1] + 1, end - 1 - last)
            lengths.append(emitted)
            last += emitted
    return lengths
