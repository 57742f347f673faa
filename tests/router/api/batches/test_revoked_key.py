"""A download over gRPC whose key is revoked. Uploads: test_service.py; over HTTP: test_endpoint.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.common import batch_bounds
from libs.common.rpc.call_reset import resetting_after
from services.router.api.batches.rpc import service
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import batches_pb2
from slipstream.v1.batches_pb2_grpc import BatchServiceStub
from tests.router.conftest import WAIT_S
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.two_faces import TwoFaces, key_of, two_faces


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


async def test_a_download_ends_with_its_key_amid_a_chunk(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub: Any = BatchServiceStub(faces.channel)
    content = b"x" * batch_bounds.FILE_CHUNK_BYTES
    header = batches_pb2.UploadFileRequest(header=batches_pb2.FileHeader(name="a", n_bytes=len(content)))
    parts = iter([header, batches_pb2.UploadFileRequest(content=content)])
    file = (await stub.UploadFile(parts, metadata=key_of(), timeout=WAIT_S)).file

    def revoking(stall_s: float) -> AbstractContextManager[None]:
        """Revokes the key once a piece is to be written."""
        faces.revoke_all()
        return resetting_after(stall_s)

    monkeypatch.setattr(service, "resetting_after", revoking)
    call = stub.DownloadFile(
        batches_pb2.DownloadFileRequest(file_id=file.id), metadata=key_of(), timeout=WAIT_S
    )
    assert (await call.read()).content == content[:PIECE_BYTES]
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert isinstance(from_rpc_error(ended.value), errors.Unauthenticated)
