"""The worst of what a tenant stores: uploads, batches, responses, jobs, and long lists of them.

Each kind prepares what it needs before the stream begins that it is measured beside.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from libs.common import batch_bounds
from slipstream.rpc.dial import MAX_MESSAGE_BYTES
from slipstream.v1 import batches_pb2, jobs_pb2, responses_pb2, router_pb2
from slipstream.v1.batches_pb2_grpc import BatchServiceStub
from slipstream.v1.jobs_pb2_grpc import JobServiceStub
from slipstream.v1.responses_pb2_grpc import ResponseServiceStub
from slipstream.v1.router_pb2_grpc import RouterServiceStub

_LIMIT_S = 180.0
_BOUNDARY = "worst"
_RUN = "/client/v4/accounts/a/ai/run/model"  # the name of bench.router.rig's model
_CHAT = "/v1/chat/completions"
_HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
_ENDED = ("completed", "failed", "cancelled", "expired")


class StoringTenant:
    """A tenant at one router, over both APIs. Every method blocks."""

    def __init__(self, http_endpoint: str, grpc_endpoint: str, headers: dict[str, str]) -> None:
        self._http = http_endpoint
        self._headers = headers
        self._files: list[str] = []
        self.metadata = tuple(headers.items())
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", -1),
        ]
        self._channel = grpc.insecure_channel(grpc_endpoint, options)
        self.batches: Any = BatchServiceStub(self._channel)
        self.jobs: Any = JobServiceStub(self._channel)
        self.responses: Any = ResponseServiceStub(self._channel)
        self.router: Any = RouterServiceStub(self._channel)

    def clean(self) -> None:
        """Delete the files that were uploaded."""
        for file_id in self._files:
            self.call(self.batches.DeleteFile, batches_pb2.DeleteFileRequest(file_id=file_id))
        self._files.clear()

    def ask(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, Any]:
        """The status and the JSON of an answer; None for one that is none."""
        host, _, port = self._http.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_LIMIT_S)
        try:
            connection.request(method, path, body, {"Content-Type": kind, **self._headers})
            answer = connection.getresponse()
            data = answer.read()
            is_json = answer.getheader("Content-Type", "").startswith("application/json")
            return answer.status, json.loads(data) if is_json else None
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Post an object."""
        return self.ask("POST", path, json.dumps(body).encode())

    def call(self, method: Any, request: Any) -> Any:
        """The answer of an RPC. Raises grpc.RpcError."""
        return method(request, metadata=self.metadata, timeout=_LIMIT_S)

    def upload(self, content: bytes) -> tuple[int, str]:
        """The status of an upload by a form, and the file's id."""
        kind = f"multipart/form-data; boundary={_BOUNDARY}"
        status, answer = self.ask("POST", "/v1/files", _form(content), kind)
        if status != 200:
            return status, ""
        self._files.append(answer["id"])
        return status, answer["id"]

    def upload_pieces(self, pieces: Iterator[bytes], n_bytes: int) -> str:
        """A file's id, by gRPC in these pieces."""

        def messages() -> Iterator[batches_pb2.UploadFileRequest]:
            header = batches_pb2.FileHeader(name="worst.jsonl", n_bytes=n_bytes)
            yield batches_pb2.UploadFileRequest(header=header)
            for piece in pieces:
                yield batches_pb2.UploadFileRequest(content=piece)

        self._files.append(self.call(self.batches.UploadFile, messages()).file.id)
        return self._files[-1]


Kind = Callable[[StoringTenant], Callable[[], str]]


def _form(content: bytes) -> bytes:
    purpose = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return purpose.encode() + file.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode()


def _line(index: int, content: str = "hi") -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return json.dumps({"custom_id": str(index), "method": "POST", "url": _CHAT, "body": body}).encode()


def _uploaded(content: Callable[[], bytes]) -> Kind:
    """A file by a form."""

    def prepare(tenant: StoringTenant) -> Callable[[], str]:
        data = content()
        return lambda: str(tenant.upload(data)[0])

    return prepare


def _uploaded_in(piece_bytes: int, n_bytes: int) -> Kind:
    """A file by gRPC in pieces of this size, and its content read again."""

    def prepare(tenant: StoringTenant) -> Callable[[], str]:
        def send() -> str:
            piece, count = b"\n" * piece_bytes, n_bytes // piece_bytes
            file_id = tenant.upload_pieces((piece for _ in range(count)), piece_bytes * count)
            request = batches_pb2.DownloadFileRequest(file_id=file_id)
            read = sum(len(answer.content) for answer in tenant.call(tenant.batches.DownloadFile, request))
            return "OK" if read == n_bytes else f"{read} bytes"

        return send

    return prepare


def _batch(content: Callable[[], bytes]) -> Kind:
    """A batch of this file until it has failed, or until its lines are read; then it is cancelled."""

    def prepare(tenant: StoringTenant) -> Callable[[], str]:
        status, file_id = tenant.upload(content())
        if status != 200:
            raise RuntimeError(f"the upload was answered {status}")

        def send() -> str:
            asked = {"input_file_id": file_id, "endpoint": _CHAT, "completion_window": "24h"}
            status, batch = tenant.post("/v1/batches", asked)
            if status != 200:
                return str(status)
            path, is_cancelled = f"/v1/batches/{batch['id']}", False
            while batch["status"] not in _ENDED:
                if batch["status"] == "in_progress" and not is_cancelled:
                    tenant.post(f"{path}/cancel", {})
                    is_cancelled = True
                time.sleep(0.05)
                batch = tenant.ask("GET", path)[1]
            return str(batch["status"])

        return send

    return prepare


def _continued_items(tenant: StoringTenant) -> Callable[[], str]:
    """A stored response of many items that goes on, and is read."""
    items = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}] * 4000
    status, first = tenant.post("/v1/responses", {"input": items, "max_output_tokens": 1, "store": True})
    if status != 200:
        raise RuntimeError(f"the response was answered {status}: {first}")

    def send() -> str:
        going_on = {"input": "b", "previous_response_id": first["id"], "max_output_tokens": 1, "store": True}
        status, _ = tenant.post("/v1/responses", going_on)
        tenant.ask("GET", f"/v1/responses/{first['id']}")
        tenant.ask("GET", f"/v1/responses/{first['id']}/input_items?limit=100")
        return str(status)

    return send


def _continued_messages(tenant: StoringTenant) -> Callable[[], str]:
    """The same by gRPC."""
    text = router_pb2.ContentPart(text="a")
    message = router_pb2.Message(role=router_pb2.MESSAGE_ROLE_USER, content=[text])

    def answered(count: int, previous: str) -> str:
        chat = router_pb2.Chat(messages=[message] * count)
        request = router_pb2.GenerateRequest(chat=chat, store=True, previous_response_id=previous)
        request.sampling.max_tokens = 1
        found = previous
        for answer in tenant.call(tenant.router.Generate, request):
            for event in answer.events:
                found = event.started.response_id or found
        return found

    first = answered(4000, "")

    def send() -> str:
        answered(1, first)
        tenant.call(tenant.responses.GetResponse, responses_pb2.GetResponseRequest(response_id=first))
        page = responses_pb2.ListInputItemsRequest(response_id=first, limit=100)
        tenant.call(tenant.responses.ListInputItems, page)
        return "OK"

    return send


def _queued_runs(tenant: StoringTenant) -> Callable[[], str]:
    """As many runs as one call queues, and questions after them. They run once no live request does."""

    def send() -> str:
        status, answer = tenant.post(f"{_RUN}?queueRequest=true", {"requests": [_HI] * 500})
        if status != 200:
            return str(status)
        request_id = {"request_id": answer["result"]["request_id"]}
        return str(max(tenant.post(_RUN, request_id)[0] for _ in range(20)))

    return send


def _listed_jobs(tenant: StoringTenant) -> Callable[[], str]:
    """The longest page of jobs, and the end of all of them."""
    body = json.dumps({**_HI, "messages": [{"role": "user", "content": "x" * 15_000}]}).encode()

    def send() -> str:
        jobs = [jobs_pb2.NewJob(path=_CHAT, body=body, reference="r" * 400, group_id="worst")] * 500
        tenant.call(tenant.jobs.SubmitJobs, jobs_pb2.SubmitJobsRequest(jobs=jobs))
        tenant.call(tenant.jobs.ListJobs, jobs_pb2.ListJobsRequest(group_id="worst", limit=1000))
        tenant.call(tenant.jobs.CancelJobs, jobs_pb2.CancelJobsRequest(group_id="worst"))
        return "OK"

    return send


def _listed_files(tenant: StoringTenant) -> Callable[[], str]:
    """Nearly as many files as a tenant may have, on one page."""
    made = [tenant.upload_pieces(iter([b"\n"]), 1) for _ in range(900)]

    def send() -> str:
        status, _ = tenant.ask("GET", f"/v1/files?limit={len(made)}")
        tenant.call(tenant.batches.ListFiles, batches_pb2.ListFilesRequest(limit=len(made)))
        return str(status)

    return send


_MOST = batch_bounds.MAX_FILE_BYTES
_LINES = batch_bounds.MAX_BATCH_LINES
KINDS: dict[str, Kind] = {
    "/v1/files, 100 MiB of short lines": _uploaded(lambda: b'{"a":1}\n' * (_MOST // 8)),
    "UploadFile and DownloadFile, 100 MiB": _uploaded_in(batch_bounds.FILE_CHUNK_BYTES, _MOST),
    "UploadFile, 20,000 pieces of a byte": _uploaded_in(1, 20_000),
    "/v1/batches, 50,000 lines": _batch(lambda: b"\n".join([_line(n) for n in range(_LINES)])),
    "/v1/batches, 50,000 lines of one id": _batch(lambda: b"\n".join([_line(1)] * _LINES)),
    "/v1/batches, 100 MiB of brackets": _batch(lambda: b"[\n" * (_MOST // 2)),
    "/v1/batches, 100 MiB of empty lines": _batch(lambda: b"\n" * _MOST),
    "/v1/batches, 12 lines of 8 MiB": _batch(
        lambda: b"\n".join([_line(n, "\x01" * 1_390_000) for n in range(12)])
    ),
    "/v1/responses, 4000 stored items": _continued_items,
    "Generate, 4000 stored messages": _continued_messages,
    "ListJobs, 500 of 15 KB": _listed_jobs,
    "ListFiles, 900 files": _listed_files,
    "run, 500 queued": _queued_runs,
}
