"""Files and batches as messages of BatchService. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from libs.common import batch_bounds
from services.router.api.batches.batch_body import check_names, checked_metadata
from services.router.api.batches.batch_store import decode_batch
from services.router.api.batches.lines import DefectCode
from services.router.api.batches.records import NewBatch, RequestBatch, StoredFile
from services.router.api.batches.states import BatchState
from slipstream.enum_names import EnumNames
from slipstream.v1 import batches_pb2

_PURPOSES = EnumNames.of(batches_pb2.FilePurpose, unspecified="")
_DEFECT_CODES = {code: batches_pb2.LineErrorCode.Value(f"LINE_ERROR_CODE_{code.name}") for code in DefectCode}
_STATES = {state: batches_pb2.BatchState.Value(f"BATCH_STATE_{state.name}") for state in BatchState}


def purpose_of(purpose: batches_pb2.FilePurpose.ValueType) -> str:
    """The purpose as files have it; empty for any. Raises InvalidArgument for an unknown one."""
    name = _PURPOSES.find(purpose)
    if name is None:
        raise batch_bounds.LISTED_PURPOSE.refused()
    return name


def ttl_s_of(ttl_ms: int, field: str) -> int:
    """The life of a file, in whole seconds. Raises InvalidArgument naming the field."""
    if not ttl_ms:
        return batch_bounds.FILE_TTL_S
    batch_bounds.TTL_MS.check(ttl_ms, field)
    return -(-ttl_ms // 1000)


def new_batch(request: batches_pb2.CreateBatchRequest, endpoints: Collection[str]) -> NewBatch:
    """The batch that a client asks for. Raises InvalidArgument naming the field, and NotFound."""
    check_names(request.input_file_id, request.endpoint, endpoints)
    return NewBatch(
        request.endpoint,
        request.input_file_id,
        checked_metadata(dict(request.metadata)),
        ttl_s_of(request.output_ttl_ms, "output_ttl_ms"),
    )


def file_message(file: StoredFile) -> batches_pb2.File:
    """A file."""
    return batches_pb2.File(
        id=file.id,
        name=file.name,
        purpose=_PURPOSES.values.get(file.purpose, batches_pb2.FILE_PURPOSE_UNSPECIFIED),
        n_bytes=file.n_bytes,
        created_unix_s=file.created_unix_s,
        expires_unix_s=file.expires_unix_s,
    )


def batch_message(batch: RequestBatch) -> batches_pb2.Batch:
    """A batch."""
    counts, tokens = batch.counts, batch.tokens
    return batches_pb2.Batch(
        id=batch.id,
        state=_STATES[batch.state],
        endpoint=batch.endpoint,
        input_file_id=batch.input_file,
        output_file_id=batch.output_file or "",
        error_file_id=batch.error_file or "",
        errors=[
            batches_pb2.LineError(
                code=_DEFECT_CODES[each.code],
                message=each.message,
                line=each.line or 0,
                field=each.param or "",
            )
            for each in batch.defects
        ],
        counts=batches_pb2.LineCounts(total=counts.total, completed=counts.completed, failed=counts.failed),
        usage=batches_pb2.BatchUsage(
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
            reasoning_tokens=tokens.reasoning,
        ),
        model=batch.model or "",
        metadata=batch.metadata,
        created_unix_s=batch.created_unix_s,
        expires_unix_s=batch.expires_unix_s,
        in_progress_unix_s=batch.in_progress_unix_s or 0,
        finalizing_unix_s=batch.finalizing_unix_s or 0,
        cancelling_unix_s=batch.cancelling_unix_s or 0,
        ended_unix_s=batch.ended_unix_s or 0,
    )


def batches_page(records: Sequence[str], limit: int) -> bytes:
    """The ListBatchesResponse of records, of which there may be one more than the limit.

    The page ends where it is full, after one batch at the least.
    """
    response, n_bytes = batches_pb2.ListBatchesResponse(), 0
    for record in records[:limit]:
        message = batch_message(decode_batch(record))
        n_bytes += message.ByteSize()
        if response.batches and n_bytes > batch_bounds.BATCHES_PAGE_BYTES:
            break
        response.batches.append(message)
    response.has_more = len(records) > len(response.batches)
    return response.SerializeToString()
