"""The two calls of Kubernetes' API that writing deletion costs takes: list pods, patch one annotation.

Answers hold the metadata of pods alone (PartialObjectMetadata), so the writer reads no variable of a pod.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from slipstream.errors import (
    DataCorrupt,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SlipstreamError,
    Unauthenticated,
    Unavailable,
)
from slipstream.pod_costs.decision import CostedPod, CostWrite

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
TIER_LABEL = "app.kubernetes.io/component"
NAME_LABEL, NAME = "app.kubernetes.io/name", "slipstream"
FIELD_MANAGER = "slipstream-pod-costs"

_TIMEOUT_S = 5.0  # of a connection, and of each read and write
_PAGE_PODS = 250
_MAX_PAGES = 16
_MAX_ANSWER_BYTES = 8 << 20
_MAX_TOKEN_BYTES = 64 << 10
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_INT32 = range(-(1 << 31), 1 << 31)


@dataclass(frozen=True, slots=True)
class KubeAddress:
    """Where the API server is, and the files that a pod of the cluster has for it."""

    host: str
    port: int
    namespace: str
    token: Path
    ca: Path

    @classmethod
    def of_pod(
        cls, environment: Mapping[str, str] = os.environ, files: Path = SERVICE_ACCOUNT
    ) -> KubeAddress:
        """The API of the cluster whose pod this is. Raises InvalidArgument outside of one."""
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidArgument("KUBERNETES_SERVICE_HOST", "and _PORT are not set: this is no pod")
        try:
            namespace = (files / "namespace").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            namespace = ""
        if not _NAMESPACE.fullmatch(namespace):
            raise InvalidArgument(str(files / "namespace"), "must hold the name of the pod's namespace")
        return cls(host, int(port), namespace, files / "token", files / "ca.crt")


class KubeSession:
    """One connection with the token of now. Not thread-safe; calls block."""

    def __init__(self, connection: http.client.HTTPSConnection, namespace: str, token: str) -> None:
        self._connection = connection
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        self._token = token

    def pods(self) -> list[CostedPod]:
        """The pods with our labels that a ReplicaSet may remove. Raises SlipstreamError."""
        found: list[CostedPod] = []
        more = ""
        for _ in range(_MAX_PAGES):
            query = {"labelSelector": f"{NAME_LABEL}={NAME}", "limit": str(_PAGE_PODS)} | (
                {"continue": more} if more else {}
            )
            answer = self._call("GET", f"{self._path}?{urlencode(query)}", accept=_METADATA.format("List"))
            try:
                found += filter(None, map(_costed, answer["items"]))
                more = answer["metadata"].get("continue") or ""
            except (AttributeError, KeyError, TypeError):
                raise DataCorrupt("the API server's list of pods has no items with metadata") from None
            if not more:
                return found
        raise FailedPrecondition(f"the namespace has more than {_MAX_PAGES * _PAGE_PODS} pods of Slipstream")

    def write(self, write: CostWrite) -> None:
        """Set the annotation of the very pod: one of its name with another uid is refused as changed."""
        metadata = {"uid": write.pod.uid, "annotations": {ANNOTATION: str(write.cost)}}
        self._call(
            "PATCH",
            f"{self._path}/{quote(write.pod.name, safe='')}?{urlencode({'fieldManager': FIELD_MANAGER})}",
            accept=_METADATA.format(""),
            body=json.dumps({"metadata": metadata}),
        )

    def _call(self, method: str, path: str, *, accept: str, body: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": accept, "User-Agent": FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            self._connection.request(method, path, body, headers)
            with self._connection.getresponse() as answer:
                status, content = answer.status, answer.read(_MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(f"the API server cannot be asked: {reason}") from None
        if len(content) > _MAX_ANSWER_BYTES:
            self._connection.close()  # the rest of the answer is on it
            raise DataCorrupt(f"an answer of the API server exceeds {_MAX_ANSWER_BYTES} bytes")
        if status != 200:
            raise _refusal(status, f"{method} {path.partition('?')[0]}")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise DataCorrupt("an answer of the API server is no JSON") from None


@contextmanager
def kube_session(address: KubeAddress) -> Iterator[KubeSession]:
    """A connection to the API server. The token and the authority are read each time: both rotate.

    Raises Unauthenticated where one of them cannot be read. It connects at the first call.
    """
    try:
        with address.token.open(encoding="ascii") as opened:
            token = opened.read(_MAX_TOKEN_BYTES).strip()
        context = ssl.create_default_context(cafile=str(address.ca))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise Unauthenticated(f"the files of the service account cannot be used: {why}") from None
    if not token or not token.isprintable() or " " in token:
        raise Unauthenticated(f"{address.token} must hold one token and nothing else")
    connection = http.client.HTTPSConnection(address.host, address.port, timeout=_TIMEOUT_S, context=context)
    try:
        yield KubeSession(connection, address.namespace, token)
    finally:
        connection.close()


def _refusal(status: int, call: str) -> SlipstreamError:
    """The typed error of a status. The text of the answer is left out: it repeats what was sent."""
    said = f"{call} was answered with {status}"
    if status == 401:
        return Unauthenticated(f"{said}: the token of the service account is not valid")
    if status == 403:
        return PermissionDenied(f"{said}: the Role must allow `list` and `patch` of pods")
    if status == 404:
        return NotFound(said)
    if status in (409, 410, 422):  # a conflict, a page that is no longer there, another pod of the name
        return FailedPrecondition(said)
    return Unavailable(said)


def _costed(item: Any) -> CostedPod | None:
    """A pod that counts; None for one that ends, that no ReplicaSet owns, or that is not ours."""
    metadata = item["metadata"]
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    owners = metadata.get("ownerReferences") or ()
    is_owned = any(owner.get("controller") and owner.get("kind") == "ReplicaSet" for owner in owners)
    if not is_owned or metadata.get("deletionTimestamp") or labels.get(NAME_LABEL) != NAME:
        return None
    return CostedPod(
        str(labels.get(TIER_LABEL, "")), str(metadata["name"]), str(metadata["uid"]), _cost(annotations)
    )


def _cost(annotations: Mapping[str, Any]) -> int | None:
    text = str(annotations.get(ANNOTATION, ""))
    if not re.fullmatch(r"-?[0-9]{1,10}", text) or int(text) not in _INT32:
        return None
    return int(text)
