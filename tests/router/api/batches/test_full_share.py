"""gRPC calls of a tenant whose clients leave all that it may be sent unread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common import api_bounds
from services.router.admission.tenant_shares import TextShares
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import batches_pb2, jobs_pb2
from slipstream.v1.batches_pb2_grpc import BatchServiceStub
from slipstream.v1.jobs_pb2_grpc import JobServiceStub
from tests.router.api.batches.conftest import line
from tests.router.conftest import WAIT_S, eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.two_faces import TwoFaces, key_of, two_faces

SHARE = api_bounds.MAX_TENANT_SENT_RESPONSE_BYTES
JOB = jobs_pb2.NewJob(
    path="/v1/chat/completions", body=b'{"messages": [{"role": "user", "content": "q"}]}', reference="r" * 250
)


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


def full_share(faces: TwoFaces) -> TextShares:
    """The share of alice, all taken."""
    sent = faces.router._grpc._sent
    sent.acquire("alice", SHARE)
    return sent


async def test_a_download_is_refused(faces: TwoFaces) -> None:
    stub: Any = BatchServiceStub(faces.channel)
    header = batches_pb2.UploadFileRequest(header=batches_pb2.FileHeader(name="a", n_bytes=len(line("a"))))
    content = batches_pb2.UploadFileRequest(content=line("a"))
    file = (await stub.UploadFile(iter([header, content]), metadata=key_of(), timeout=WAIT_S)).file
    sent = full_share(faces)
    request = batches_pb2.DownloadFileRequest(file_id=file.id)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.DownloadFile(request, metadata=key_of(), timeout=WAIT_S).read()
    assert isinstance(from_rpc_error(refused.value), errors.Overloaded)
    sent.release("alice", SHARE)
    found = [part.content async for part in stub.DownloadFile(request, metadata=key_of(), timeout=WAIT_S)]
    assert b"".join(found) == line("a")


async def test_the_answer_names_stored_jobs_beyond_the_share(faces: TwoFaces) -> None:
    """A refused answer would be taken for refused jobs, which are sent again."""
    sent, stub = full_share(faces), JobServiceStub(faces.channel)
    request = jobs_pb2.SubmitJobsRequest(jobs=[JOB] * 500)
    submit: Any = stub.SubmitJobs(request, metadata=key_of(), timeout=WAIT_S)
    answer = await submit
    assert len(answer.jobs) == 500 and answer.ByteSize() > 64 << 10
    await eventually(lambda: sent.held_chars == SHARE)
