"""A cluster with API keys, one process of each service on the fake engine, and credentials of every class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from libs.common.cluster.worker_record import Role
from slipstream.client import Client
from slipstream.cluster_record import secret_file
from slipstream.credentials.api_key_file import add_key
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import TokenMinter
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster

CALL_S = 60.0
PUBLIC_PORT = "router-0 public"
Metadata = tuple[tuple[str, str], ...]


class KeyedCluster:
    """The running cluster, and calls to its ports with a credential."""

    def __init__(self, cluster: LocalCluster, key: str) -> None:
        self.cluster = cluster
        self.key = key
        secret = ClusterSecret.from_file(secret_file(cluster.run_dir))
        self.peer = TokenMinter(secret, "prefill-9")
        self.operator = TokenMinter(secret, "tests", CallerClass.OPERATOR)

    def metadata(self, kind: CallerClass, port: str) -> Metadata:
        """What authenticates a caller of the class to a port of `ports`."""
        endpoint = self.ports()[port]
        return {
            CallerClass.PUBLIC: (),
            CallerClass.TENANT: (("authorization", f"Bearer {self.key}"),),
            CallerClass.PEER: self.peer.tokens_for(endpoint).metadata(),
            CallerClass.OPERATOR: self.operator.tokens_for(endpoint).metadata(),
        }[kind]

    def ports(self) -> dict[str, str]:
        """The endpoints of all gRPC ports, by the name of the process; a router has two."""
        return {**self.cluster.workers, PUBLIC_PORT: self.cluster.grpc}

    def call(
        self,
        port: str,
        method: str,
        message: Any = b"",
        *,
        kind: CallerClass = CallerClass.PUBLIC,
        metadata: Metadata = (),
    ) -> grpc.StatusCode:
        """The status of a call with one message and the credential of `kind`; OK as soon as it has an answer.

        `metadata` is sent instead of the credential where it is given."""
        with grpc.insecure_channel(self.ports()[port]) as channel:
            begin: Any = channel.stream_stream(method)
            data = message if isinstance(message, bytes) else message.SerializeToString()
            credential = metadata or self.metadata(kind, port)
            call = begin(iter([data]), timeout=CALL_S, metadata=credential)
            try:
                next(call, None)
                return grpc.StatusCode.OK
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            finally:
                call.cancel()

    def client(self) -> Client:
        """A client of the tenant."""
        return Client(self.cluster.grpc, api_key=self.key, timeout_s=REQUEST_S)


@contextmanager
def keyed_cluster(run_dir: Path) -> Iterator[KeyedCluster]:
    """The cluster is ready inside the block, and has ended after it."""
    keys = run_dir / "keys.toml"
    key = add_key(keys, name="anna-laptop", tenant="anna")
    one = dict.fromkeys(("prefill", "decode", "kvstores", "drafters", "routers"), 1)
    config = fake_engine_config(run_dir, pace_s=0.0003, **one)
    extra = {**config.extra_arguments, Role.ROUTER: ["--api-keys", str(keys)]}
    with LocalCluster(fake_engine_config(run_dir, pace_s=0.0003, **one, extra_arguments=extra)) as running:
        yield KeyedCluster(running, key)
