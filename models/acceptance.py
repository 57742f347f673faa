"""Acceptance length of a draft head, by replaying the greedy verification on known text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.batches import Example
from models.eagle_network import EagleHead
from models.network import Network


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
    n = len(ids) - 1
    padded = F.pad(ids, (0, drafts))
    embedded = F.embedding(padded, target.embed_tokens.weight).unsqueeze(0)
    hidden = head.unroll(features[:n].unsqueeze(0), embedded, drafts)
    argmax = F.pad(logits.argmax(-1), (0, drafts + 1), value=-1)
    matches = torch.stack(
        [head.logits(h[0]).argmax(-1) == argmax[1 + s : 1 + s + n] for s, h in enumerate(hidden)]
    )
    leading = matches.int().cumprod(0).sum(0).tolist()
    lengths = []
    for start, end in example.spans:
        last = start
        while last < end - 1:
            emitted = min(int(leading[last - 1]) + 1, end - 1 - last)
            lengths.append(emitted)
            last += emitted
    return lengths
