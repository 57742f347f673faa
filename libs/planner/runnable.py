"""Which cuts the workers of this version start. Pure: the one place where the planner asks it."""

from __future__ import annotations

from libs.engine.parallel.limits import group_refusals
from libs.planner.cuts import PAGE_TOKENS, Cut
from libs.planner.nodes import worker_nodes
from slipstream.errors import InvalidArgument

DEVICE = "cuda"  # of a plan's workers


def cut_refusals(cut: Cut, *, decode_steps: str = "plain") -> list[InvalidArgument]:
    """Why no worker of this cut starts on cards, the first reason first; empty: it starts.

    The rule is the engine's. A cut that exchanges queries has no form of `--parallel`.
    """
    if cut.exchanges_queries:
        return [InvalidArgument("parallel", "no worker exchanges queries")]
    return group_refusals(
        cut.sizes,
        device=DEVICE,
        kernels="triton",
        block_tokens=PAGE_TOKENS,
        decode_steps=decode_steps,
        n_machines=worker_nodes(cut),
    )
