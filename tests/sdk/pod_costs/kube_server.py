"""An HTTPS server in a thread that answers the two calls of Kubernetes' API, as a real one would.

It refuses what a real one refuses: other tokens, content types, fields and paths. A patch changes the pod.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slipstream.pod_costs.kube_api import ANNOTATION, KubeAddress
from tests.support.tls.authority import Authority

NAMESPACE = "serving"
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


def pod(tier: str, name: str, cost: str | None = None, *, uid: str = "", **metadata: Any) -> dict[str, Any]:
    """The metadata of a pod of a Deployment."""
    labels = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/component": tier}
    owner = {"kind": "ReplicaSet", "name": f"slipstream-{tier}-5d4f9", "controller": True}
    annotations = {"a": "b"} | ({} if cost is None else {ANNOTATION: cost})
    made = {"name": name, "uid": uid or f"uid-{name}", "labels": labels, "ownerReferences": [owner]}
    return {**made, "annotations": annotations, **metadata}


class KubeServer:
    """The state: `pods` by name, the valid `token`, the answers that are forced, and what was called."""

    def __init__(self, folder: Path, *pods: dict[str, Any]) -> None:
        self.pods = {each["name"]: each for each in pods}
        self.token = "first"
        self.page_pods = 2
        self.forced: dict[str, int] = {}  # the status by method, or by name of a pod
        self.calls: list[tuple[str, str]] = []  # (method, path)
        self.writes: list[tuple[str, str]] = []  # (pod, cost)
        self.raw: bytes | None = None  # the body of every answer
        self._folder = folder
        self._files = Authority(folder / "authority").issue("kube-apiserver")
        (folder / "ca.crt").write_bytes(self._files.ca.read_bytes())
        (folder / "namespace").write_text(NAMESPACE)
        self.give_token("first")

    def give_token(self, token: str) -> None:
        """What the kubelet writes into the pod."""
        (self._folder / "token").write_text(token)

    @contextmanager
    def serving(self) -> Iterator[KubeAddress]:
        """Serve inside the block."""
        state = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                state.answer(self, "GET")

            def do_PATCH(self) -> None:
                state.answer(self, "PATCH")

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.certificate, self._files.key)
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            environment = {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(server.server_port),
            }
            try:
                yield KubeAddress.of_pod(environment, self._folder)
            finally:
                server.shutdown()
                thread.join()

    def answer(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        """Answer one call."""
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.calls.append((method, url.path))
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        status, said = self._answer(handler, method, url.path, query, body)
        content = json.dumps(said).encode() if self.raw is None else self.raw
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def _answer(
        self, handler: BaseHTTPRequestHandler, method: str, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        name = path.rpartition("/")[2]
        if forced := self.forced.get(method) or self.forced.get(name):
            return forced, {"kind": "Status"}
        if handler.headers["Authorization"] != f"Bearer {self.token}":
            return 401, {"kind": "Status"}
        if method == "GET" and path == PATH:
            assert handler.headers["Accept"] == _accept("PartialObjectMetadataList")
            assert query["labelSelector"] == "app.kubernetes.io/name=slipstream"
            return 200, self._page(int(query.get("continue", 0)), int(query["limit"]))
        if method == "PATCH" and path == f"{PATH}/{name}":
            assert handler.headers["Accept"] == _accept("PartialObjectMetadata")
            if handler.headers["Content-Type"] != "application/merge-patch+json":
                return 415, {"kind": "Status"}
            assert query == {"fieldManager": "slipstream-pod-costs"}
            return self._patch(name, json.loads(body))
        return 404, {"kind": "Status"}

    def _page(self, at: int, limit: int) -> Any:
        size = min(limit, self.page_pods)
        items = [{"metadata": each} for each in self.pods.values()]
        more = {"continue": str(at + size)} if at + size < len(items) else {}
        return {"metadata": {"resourceVersion": "7", **more}, "items": items[at : at + size]}

    def _patch(self, name: str, patch: Any) -> tuple[int, Any]:
        if name not in self.pods:
            return 404, {"kind": "Status"}
        assert set(patch) == {"metadata"} and set(patch["metadata"]) == {"uid", "annotations"}
        assert set(patch["metadata"]["annotations"]) == {ANNOTATION}
        if patch["metadata"]["uid"] != self.pods[name]["uid"]:
            return 422, {"kind": "Status"}
        cost = patch["metadata"]["annotations"][ANNOTATION]
        assert -(1 << 31) <= int(cost) < 1 << 31 and str(int(cost)) == cost
        self.pods[name]["annotations"][ANNOTATION] = cost
        self.writes.append((name, cost))
        return 200, {"metadata": self.pods[name]}


def _accept(kind: str) -> str:
    return f"application/json;as={kind};g=meta.k8s.io;v=v1"
