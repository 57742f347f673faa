"""Computes gradients of several micro-batches in parallel: one thread of torch per worker.

Two workers with a micro-batch each synchronise once per step. Two threads inside every operation would
synchronise thousands of times, which is slow on a shared machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


def worker_pool(workers: int) -> ThreadPoolExecutor:
    """A pool whose threads run torch on one thread each."""
    return ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))


def accumulate_gradients(
    pool: ThreadPoolExecutor,
    parameters: Sequence[nn.Parameter],
    loss: Callable[[T], tuple[Tensor, Tensor]],
    parts: Sequence[T],
) -> float:
    """Sets `grad` of all parameters to that of the weighted mean loss over `parts`; returns that loss.

    `loss` gives (sum of weighted losses, sum of weights) of a part.
    """

    def work(part: T) -> tuple[float, float, tuple[Tensor, ...]]:
        total, weight = loss(part)
        return total.item(), weight.item(), torch.autograd.grad(total, parameters)

    results = list(pool.map(work, parts))
    whole = sum(weight for _, weight, _ in results)
    for index, p in enumerate(parameters):
        grad = results[0][2][index]
        for other in results[1:]:
            grad = grad + other[2][index]
        p.grad = grad / whole
    return sum(total for total, _, _ in results) / whole
