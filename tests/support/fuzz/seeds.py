"""Valid messages of every service, from which a fuzzer makes others."""

from __future__ import annotations

import random
from array import array
from typing import Any

from google.protobuf.message import Message

from libs.common.block_hash import chain_hashes
from slipstream.block_hashes import pack_hashes
from slipstream.keda import externalscaler_pb2 as keda
from slipstream.sampling import SAMPLING_DEFAULTS
from slipstream.v1 import (
    autoscale_pb2,
    batches_pb2,
    common_pb2,
    decode_pb2,
    drafter_pb2,
    fleet_pb2,
    jobs_pb2,
    kvstore_pb2,
    prefill_pb2,
    responses_pb2,
    router_pb2,
    worker_pb2,
)

# Of RouterService.
HEADERS: dict[str, tuple[str | bytes, ...]] = {
    "x-session-affinity": ("s", "a" * 257, ""),
    "x-session-affinity-bin": (b"\xff\xfe", b"caf\xc3\xa9", b"", b"\x00"),
    "x-slipstream-attempt": ("1", "2", "-1", "99999999999", "x"),
    "x-slipstream-priority": ("bulk", "interactive", "none"),
    "x-slipstream-prefill": ("prefill-0", "none"),
    "x-slipstream-debug": ("1",),
    "traceparent": ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "zz"),
    "authorization": ("Bearer x", "bearer", ""),
}
_SALT = b"tenant"
_LEASE_MS = 1000
_WIDTH = 8  # of a feature, in floats
_BLOCK_BYTES = 4096


def router_seeds() -> list[Message]:
    """Of RouterService: requests of a few tokens."""
    words = router_pb2.ContentPart(text="hello there")
    user = router_pb2.Message(role=router_pb2.MESSAGE_ROLE_USER, content=[words])
    tool = router_pb2.Tool(name="find", description="finds", parameters='{"type": "object"}')
    sampling = router_pb2.Sampling(max_tokens=3, temperature=0.5, top_logprobs=2)
    chat, with_tools = router_pb2.Chat(messages=[user]), router_pb2.Chat(messages=[user], tools=[tool])
    return [
        router_pb2.GenerateRequest(chat=chat, sampling=sampling),
        router_pb2.GenerateRequest(chat=with_tools, sampling=sampling, stop=["x"], metadata={"k": "v"}),
        router_pb2.GenerateRequest(prompt="once", sampling=sampling, request_id="r-1"),
        router_pb2.GenerateRequest(chat=chat, sampling=sampling, store=True),
        router_pb2.GenerateRequest(chat=chat, sampling=sampling, previous_response_id="resp_" + "0a" * 16),
    ]


def worker_seeds(
    fingerprint: common_pb2.Fingerprint, *, page_bytes: int, lease_ms: int = _LEASE_MS
) -> list[Message]:
    """Of PrefillService, DecodeService and the reading part of KvstoreService, with real block hashes."""
    rng, sizes = random.Random(0), (5, 40, 150)
    prompts = [array("I", [rng.randrange(1000) for _ in range(size)]) for size in sizes]
    found: list[Message] = []
    for index, tokens in enumerate(prompts):
        hashes = pack_hashes(
            chain_hashes(tokens, root=fingerprint.digest, salt=_SALT, block_tokens=fingerprint.block_tokens)
        )
        found += _of_prompt(fingerprint, tokens.tobytes(), hashes, name=str(sizes[index]), lease_ms=lease_ms)
    ticket = prefill_pb2.HandoffTicket(
        handoff_id="h",
        attempt=_attempt("r40"),
        fingerprint=fingerprint,
        control_endpoint="127.0.0.1:1",
        transport=common_pb2.TRANSPORT_SOCKET,
        transport_session="127.0.0.1:1",
        blocks=[prefill_pb2.ExportedBlock(n_bytes=page_bytes)],
        prompt_tokens=40,
        lease_ms=lease_ms,
    )
    with_ticket = decode_pb2.DecodeRequest()
    with_ticket.CopyFrom(next(each for each in found if isinstance(each, decode_pb2.DecodeRequest)))
    with_ticket.starts[0].attempt.CopyFrom(_attempt("r40"))
    with_ticket.starts[0].ticket = ticket.SerializeToString()
    return [
        *found,
        ticket,
        with_ticket,
        prefill_pb2.AbortPrefillRequest(attempt=_attempt("p5")),
        decode_pb2.AbortDecodeRequest(attempt=_attempt("r5")),
    ]


def _of_prompt(
    fingerprint: common_pb2.Fingerprint, prompt: bytes, hashes: bytes, *, name: str, lease_ms: int
) -> list[Message]:
    values: dict[str, Any] = {**SAMPLING_DEFAULTS, "temperature": 0.0}
    sampling = common_pb2.SamplingParams(max_tokens=8, ignore_eos=True, **values)
    handle = int(name)
    prefill = prefill_pb2.StartPrefill(
        handle=handle,
        attempt=_attempt(f"p{name}"),
        fingerprint=fingerprint,
        prompt=prompt,
        block_hashes=hashes,
        sampling=sampling,
        salt=_SALT,
        lease_ms=lease_ms,
    )
    decode = decode_pb2.StartSequence(
        handle=handle,
        attempt=_attempt(f"r{name}"),
        fingerprint=fingerprint,
        prompt=prompt,
        block_hashes=hashes,
        sampling=sampling,
        salt=_SALT,
    )
    pin = kvstore_pb2.PinRequest(fingerprint=fingerprint, block_hashes=hashes, owner="w", lease_ms=100)
    return [
        decode_pb2.DecodeRequest(starts=[decode]),
        prefill_pb2.PrefillRequest(starts=[prefill]),
        kvstore_pb2.PinsRequest(commands=[kvstore_pb2.PinCommand(handle=1, pin=pin)]),
    ]


def kvstore_seeds(fingerprint: common_pb2.Fingerprint) -> list[Message]:
    """Of KvstoreService. The blocks do not exist, and neither does their writer."""
    first, second = ((number).to_bytes(16, "little") for number in (1, 2))
    hashes = pack_hashes([first, second])
    pin = kvstore_pb2.PinRequest(fingerprint=fingerprint, block_hashes=hashes, owner="w", lease_ms=100)
    source = kvstore_pb2.SourceBlock(block_hash=first, address=4096, n_bytes=_BLOCK_BYTES, checksum=bytes(16))
    return [
        kvstore_pb2.LookupRequest(fingerprint=fingerprint, block_hashes=hashes),
        kvstore_pb2.PinsRequest(commands=[kvstore_pb2.PinCommand(handle=1, pin=pin)]),
        kvstore_pb2.ReserveRequest(
            fingerprint=fingerprint, block_hashes=hashes, block_bytes=_BLOCK_BYTES, owner="w"
        ),
        kvstore_pb2.CommitRequest(
            transport=common_pb2.TRANSPORT_SOCKET, transport_session="127.0.0.1:1/x", blocks=[source]
        ),
        kvstore_pb2.VerifyBlocksRequest(block_hashes=hashes),
        kvstore_pb2.DropBlocksRequest(block_hashes=hashes),
    ]


def job_seeds() -> list[Message]:
    """Of JobService. The jobs wait where no worker runs them."""
    hook = jobs_pb2.Webhook(url="https://hooks.example.com/x", secret="whsec_" + "YWJj" * 8)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
    job = jobs_pb2.NewJob(
        path="/v1/chat/completions", body=body, group_id="g", reference="r", expires_ms=60_000
    )
    response = jobs_pb2.NewJob(path="/v1/responses", body=b'{"input": "hi"}', idempotency_key="k")
    hooked = jobs_pb2.NewJob(path="/v1/completions", body=b'{"prompt": "hi"}', webhook=hook)
    return [
        jobs_pb2.SubmitJobsRequest(jobs=[job, response]),
        jobs_pb2.SubmitJobsRequest(jobs=[hooked]),
        jobs_pb2.ListJobsRequest(group_id="g", limit=5),
        jobs_pb2.CancelJobsRequest(group_id="g"),
        jobs_pb2.FollowJobsRequest(group_id="none"),
        jobs_pb2.GetJobRequest(id="job-1"),
    ]


def batch_seeds() -> list[Message]:
    """Of BatchService. No file has the ids, but those of lists."""
    header = batches_pb2.FileHeader(name="in.jsonl", n_bytes=3, ttl_ms=3_600_000)
    file_id, batch_id = "file-0123456789ab", "batch_0123456789ab"
    return [
        batches_pb2.UploadFileRequest(header=header),
        batches_pb2.UploadFileRequest(content=b"{}\n"),
        batches_pb2.GetFileRequest(file_id=file_id),
        batches_pb2.ListFilesRequest(purpose=batches_pb2.FILE_PURPOSE_BATCH, after=file_id, limit=5),
        batches_pb2.DeleteFileRequest(file_id=file_id),
        batches_pb2.DownloadFileRequest(file_id=file_id),
        batches_pb2.CreateBatchRequest(
            input_file_id=file_id,
            endpoint="/v1/chat/completions",
            metadata={"k": "v"},
            output_ttl_ms=3_600_000,
        ),
        batches_pb2.GetBatchRequest(batch_id=batch_id),
        batches_pb2.ListBatchesRequest(after=batch_id, limit=5),
        batches_pb2.CancelBatchRequest(batch_id=batch_id),
    ]


def response_seeds() -> list[Message]:
    """Of ResponseService. No response has the ids."""
    response_id, background = "resp_" + "0a" * 16, "resp_" + "0a" * 15
    return [
        responses_pb2.GetResponseRequest(response_id=response_id),
        responses_pb2.GetResponseRequest(response_id=background),
        responses_pb2.ListInputItemsRequest(response_id=response_id, after="msg_1", limit=5),
        responses_pb2.CancelResponseRequest(response_id=background),
        responses_pb2.DeleteResponseRequest(response_id=response_id),
    ]


def operator_seeds() -> list[Message]:
    """Of FleetService, AutoscaleService and ExternalScaler. No process has the name that calls go to."""
    tiers = [
        keda.ScaledObjectRef(name="a", namespace="b", scalerMetadata={"tier": t}) for t in ("decode", "x")
    ]
    status = worker_pb2.GetStatusRequest().SerializeToString()
    call = fleet_pb2.CallProcessRequest(
        role=common_pb2.WORKER_ROLE_DECODE,
        instance="none",
        method="/slipstream.v1.WorkerService/GetStatus",
        message=status,
    )
    return [
        fleet_pb2.GetFleetRequest(),
        call,
        autoscale_pb2.GetRecommendationsRequest(),
        *tiers,
        keda.GetMetricsRequest(scaledObjectRef=tiers[0], metricName="slipstream-decode-replicas"),
    ]


def drafter_seeds() -> list[Message]:
    """Of DrafterService."""
    return [
        drafter_pb2.DraftRequest(extends=[_extend("a", 0, [5, 6]), _extend("b", 9, [7])]),
        drafter_pb2.DraftRequest(extends=[_extend("a", 2, [9])], closed=["b"]),
        drafter_pb2.DraftRequest(extends=[_exported("c", 0, [9])], transport_session="127.0.0.1:9/00"),
    ]


def _extend(seq_id: str, start: int, tokens: list[int]) -> drafter_pb2.ExtendContext:
    return drafter_pb2.ExtendContext(
        seq_id=seq_id,
        start_position=start,
        next_tokens=array("I", tokens).tobytes(),
        width=_WIDTH,
        features=bytes(2 * _WIDTH * len(tokens)),
        draft_tokens=3,
    )


def _exported(seq_id: str, start: int, tokens: list[int]) -> drafter_pb2.ExtendContext:
    extend = _extend(seq_id, start, tokens)
    extend.exported.address, extend.exported.checksum = 4096, bytes(16)
    return extend


def _attempt(request_id: str) -> common_pb2.Attempt:
    return common_pb2.Attempt(request_id=request_id, attempt=1)
