"""The inputs of the steps of one bucket: memory of the device that stays where it is, filled by one copy.

Rows behind those of a step are padding: they write no KV, attend to nothing and choose no expert. Sequences
behind those of a step have no row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from libs.engine.graphs.buckets import StepBucket
from libs.engine.kernels.gpu.device_plan import DevicePlan
from libs.engine.kernels.gpu.kv_splits import KvSplits, choose_split_tokens, splits_of_rows
from libs.engine.kv.cache import PagedLatentCache
from libs.engine.model_spec.plan import ALL_SLOTS, BatchPlan
from libs.engine.sampling.device_draws import DrawArrays, DrawParameters
from libs.engine.step.batch import ForwardBatch, Int32Array

_ALIGNMENT_BYTES = 64
_LEAST_SPLIT_TOKENS = 256  # of a sequence without tokens; no program reads it
_Fields = dict[str, npt.NDArray[Any]]
_TORCH: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}


class StepInputs:
    """`fill` writes the inputs of a step; a captured step reads the tensors.

    token_ids, sources [T] i32  the token of a row; where sources[i] >= 0 it is that of row sources[i] of the
                                step before, which the host may not know yet
    """

    def __init__(
        self,
        bucket: StepBucket,
        cache: PagedLatentCache,
        *,
        rope_pairs: int,
        n_blocks: int,
        n_splits: int,
        device: torch.device,
    ) -> None:
        """`n_blocks`: of the longest context; `n_splits`: the most of a sequence. All rows are padding."""
        self._bucket = bucket
        self._n_splits = n_splits
        self._places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        end = 0
        for name, dtype, shape in _layout(bucket, rope_pairs, n_blocks):
            self._places[name] = (end, np.dtype(dtype), shape)
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self.token_ids = self._view("token_ids")
        self.sources = self._view("sources")
        self.draws = DrawParameters(
            *(self._view(name) for name in ("temperature", "min_p_log", "top_k", "top_p", "draw"))
        )
        # Programs read the table by its strides: this order keeps the blocks in use in one span of memory.
        self.device_plan = DevicePlan(
            cos_sin=self._view("cos_sin"),
            page_of_row=self._view("page_of_row"),
            offset_of_row=self._view("offset_of_row"),
            query_start=self._view("query_start"),
            context_len=self._view("context_len"),
            page_table=self._view("page_table").T,
            absorbed=torch.arange(bucket.n_sequences, dtype=torch.int32, device=device),
            absorbed_rows=torch.arange(bucket.n_rows, dtype=torch.int32, device=device),
            is_padding=self._view("is_padding"),
        )
        self.splits = KvSplits(
            self._view("split_tokens"), self._view("row_splits"), n_splits, bucket.rows_each
        )
        self.plan = _shape_of_plan(bucket, self.device_plan.cos_sin, cache)
        self._view("page_of_row").fill_(-1)
        self._view("is_padding").fill_(True)
        self._view("split_tokens").fill_(_LEAST_SPLIT_TOKENS)

    def fill(
        self, batch: ForwardBatch, plan: BatchPlan, sources: Int32Array | None, draws: DrawArrays | None
    ) -> None:
        """Begin to copy the inputs of a step. `plan` is that of `batch`, in the host."""
        offset, _, (_, n_sequences) = self._places["page_table"]
        n_blocks = int((-(-plan.context_len // plan.cache.shape.block_tokens)).max())
        n_bytes = offset + n_blocks * n_sequences * 4
        # New memory for each copy: the device may not have read that of the step before.
        host = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=self._memory.is_cuda)
        fields = self._arrays(host, n_blocks)
        _fill_plan(fields, batch, plan, self._n_splits)
        fields["sources"][:] = -1
        if sources is not None:
            fields["sources"][: len(sources)] = sources
        fields["top_p"][:] = 1.0
        if draws is not None:
            for name in ("temperature", "min_p_log", "top_k", "top_p", "draw"):
                fields[name][: batch.n_rows] = getattr(draws, name)
        self._memory[:n_bytes].copy_(host, non_blocking=True)

    def _arrays(self, host: torch.Tensor, n_blocks: int) -> _Fields:
        memory = host.numpy()
        fields: _Fields = {}
        for name, (offset, dtype, shape) in self._places.items():
            used = (n_blocks, *shape[1:]) if name == "page_table" else shape
            n_bytes = int(np.prod(used)) * dtype.itemsize
            fields[name] = memory[offset : offset + n_bytes].view(dtype).reshape(used)
        return fields

    def _view(self, name: str) -> torch.Tensor:
        offset, dtype, shape = self._places[name]
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        return self._memory[offset : offset + n_bytes].view(_TORCH[dtype.name]).view(shape)


def _layout(bucket: StepBucket, rope_pairs: int, n_blocks: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """The name, dtype and shape of each input. The page table is last: only the blocks in use are copied."""
    rows, sequences = (bucket.n_rows,), (bucket.n_sequences,)
    return [
        *[(name, "int32", rows) for name in ("token_ids", "sources", "page_of_row", "offset_of_row")],
        ("query_start", "int32", (bucket.n_sequences + 1,)),
        *[(name, "int32", sequences) for name in ("context_len", "split_tokens")],
        ("row_splits", "int32", rows),
        ("is_padding", "bool", rows),
        ("temperature", "float32", rows),
        ("min_p_log", "float32", rows),
        ("top_k", "int32", rows),
        ("top_p", "float64", rows),
        ("draw", "float64", rows),
        ("cos_sin", "float32", (bucket.n_rows, 2, rope_pairs)),
        ("page_table", "int32", (n_blocks, bucket.n_sequences)),
    ]


def _fill_plan(fields: _Fields, batch: ForwardBatch, plan: BatchPlan, n_splits: int) -> None:
    n_rows, n_sequences = batch.n_rows, batch.n_sequences
    split_tokens = choose_split_tokens(plan.context_len, n_splits)
    fields["token_ids"][:n_rows] = batch.token_ids
    fields["page_of_row"][:] = -1
    fields["page_of_row"][:n_rows] = plan.page_of_row
    fields["offset_of_row"][:n_rows] = plan.offset_of_row
    fields["query_start"][:] = n_rows
    fields["query_start"][: n_sequences + 1] = plan.query_start
    fields["context_len"][:n_sequences] = plan.context_len
    fields["split_tokens"][:] = _LEAST_SPLIT_TOKENS
    fields["split_tokens"][:n_sequences] = split_tokens
    fields["row_splits"][:n_rows] = splits_of_rows(plan, split_tokens)
    fields["is_padding"][n_rows:] = True
    fields["cos_sin"][:n_rows] = plan.cos_sin.numpy()
    table = fields["page_table"]
    width = min(len(table), plan.page_table.shape[1])
    table[:width, :n_sequences] = plan.page_table[:, :width].T


def _shape_of_plan(bucket: StepBucket, cos_sin: torch.Tensor, cache: PagedLatentCache) -> BatchPlan:
    """A plan that names the bucket's shapes. Its arrays are never read: their tensors are bound."""
    rows, sequences = np.zeros(bucket.n_rows, np.int32), np.zeros(bucket.n_sequences, np.int32)
    return BatchPlan(
        n_rows=bucket.n_rows,
        cos_sin=cos_sin,
        page_of_row=rows,
        offset_of_row=rows,
        query_start=np.zeros(bucket.n_sequences + 1, np.int32),
        context_len=sequences,
        visible=rows,
        page_table=sequences[:, None],
        absorbed=np.arange(bucket.n_sequences, dtype=np.int32),
        expanded=sequences[:0],
        cache=cache,
        share=ALL_SLOTS,
    )
