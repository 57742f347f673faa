"""Calls of BatchService with ids that name nothing, and downloads that end early."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common import batch_bounds
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.v1 import batches_pb2
from slipstream.v1.batches_pb2_grpc import BatchServiceStub
from tests.router.api.batches.conftest import CHAT
from tests.router.conftest import WAIT_S, eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.two_faces import TwoFaces, key_of, refusal, two_faces
from tests.support.logged_errors import logged_errors


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("method", ["GetFile", "DeleteFile", "GetBatch", "CancelBatch"])
async def test_a_call_without_an_id_is_refused(faces: TwoFaces, method: str) -> None:
    stub: Any = BatchServiceStub(faces.channel)
    request = getattr(batches_pb2, f"{method}Request")()
    error = await refusal(getattr(stub, method)(request, metadata=key_of(), timeout=WAIT_S))
    assert isinstance(error, errors.InvalidArgument) and error.reason == "must be given"


async def test_an_unknown_file_of_a_batch_is_named_by_its_field(faces: TwoFaces) -> None:
    stub: Any = BatchServiceStub(faces.channel)
    asked = batches_pb2.CreateBatchRequest(input_file_id="file-0123456789abcdef", endpoint=CHAT)
    error = await refusal(stub.CreateBatch(asked, metadata=key_of(), timeout=WAIT_S))
    assert isinstance(error, errors.NotFound) and error.field == "input_file_id"
    assert "file-0123456789abcdef" in error.message


async def test_a_download_that_is_cancelled_is_no_error(
    faces: TwoFaces, caplog: pytest.LogCaptureFixture
) -> None:
    """Its share covers what a stream holds that its client does not read."""
    sent = faces.router._http.generation.delivery._sent
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x" * (8 << 20), filename="a.jsonl")
    file = await faces.ask("POST", "/v1/files", data=form)
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with grpc.aio.insecure_channel(faces.router.host.endpoint, options=small) as channel:
        stub: Any = BatchServiceStub(channel)
        call = stub.DownloadFile(batches_pb2.DownloadFileRequest(file_id=file["id"]), metadata=key_of())
        first = await call.read()
        assert len(first.content) == PIECE_BYTES
        assert sent.held_chars == batch_bounds.FILE_CHUNK_BYTES + 4 * PIECE_BYTES
        call.cancel()
        await eventually(lambda: not sent.held_chars)
    assert not logged_errors(caplog)
