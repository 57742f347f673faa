"""The memory of the tensors that a call makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The bytes of new tensors that are alive, and the most at once. Only those of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = self.held_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(t)._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor)._cdata not in given | self._known:
                self._add(storage_of(tensor))
        return result

    def _add(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()

        def gone() -> None:
            self.held_bytes -= n_bytes
            self._known.discard(key)

        weakref.finalize(storage, gone)
        self._known.add(key)
        self.held_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


def peak_bytes_of(run: Callable[[], object]) -> int:
    """The most bytes of the tensors that `run` makes and that are alive at once."""
    live = LiveBytes()
    with torch.inference_mode(), live:
        run()
    return live.peak_bytes


def storage_of(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()
