"""Acceptance length of a draft head, by replaying the greedy verification on known text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.networks.eagle_network import TrainableEagleHead
from models.networks.network import Network
from models.training.batches import Example


@torch.no_grad()
def accepted_lengths(
    head: TrainableEagleHead,
    target: Network,
    example: Example,
    features: Tensor,
    logits: Tensor,
    *,
    drafts: int,
) -> list[int]:
    """The tokens, with the bonus token, of each verification step in the assistant's spans.

    features [L, 3H], logits [L, V] of the target over `example`. Prefill makes the first token of a span. A
    draft is accepted iff it is the target's argmax; a span ends with its last token. The result is exact for
    the target's own greedy output; for other text it is that of a replay.
    """
    ids = torch.tensor(example.token_ids)
    # Rows that may have to draft: those before each token of a span except the last.
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
