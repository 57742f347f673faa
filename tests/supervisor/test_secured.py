"""A local cluster with all that guards it: mutual TLS, API keys, etcd with TLS and a user."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.common.block_hash import SALT_LABEL, chain_hashes, tenant_salt
from libs.common.cluster.worker_record import Role
from libs.text.chat_template import encode_chat
from libs.text.tokenizer import Tokenizer
from slipstream.async_client import AsyncClient
from slipstream.block_hashes import pack_hashes
from slipstream.cluster_record import read_record, secret_file
from slipstream.credentials.api_key_file import add_key, revoke_key
from slipstream.errors import InvalidArgument, SlipstreamError, Unauthenticated
from slipstream.metering.rate_limits import RateLimits
from slipstream.operator_access import operator_dial
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.dial import dial
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from supervisor.cluster import ClusterSupervisor
from supervisor.commands.status import show_status
from supervisor.configuration.cluster_options import DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig
from tests.support.clusters.supervised import supervised
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.tls.authority import Authority

PASSWORD = "s3cret-of-etcd"
HELLO = [{"role": "user", "content": "hello " * 200}]


def small_model(directory: Path) -> Path:
    directory.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, directory)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 8192, "vocab_size": 1536}))
    return directory


def secured(tmp_path: Path, etcd: EtcdProcess, authority: Authority) -> ClusterConfig:
    """A cluster of real services with fake engines."""
    tls = replace(authority.issue("cluster", "peers.internal"), server_name="peers.internal")
    etcd_files = authority.issue("router")
    (tmp_path / "password").write_text(PASSWORD)
    return ClusterConfig(
        run_dir=tmp_path / "run",
        model=small_model(tmp_path / "model"),
        draft_model=None,
        prefill=1,
        decode=1,
        drafters=0,
        transport="socket",
        etcd=etcd.endpoint,
        etcd_ca=etcd_files.ca,
        etcd_certificate=etcd_files.certificate,
        etcd_key=etcd_files.key,
        etcd_user="slipstream",
        etcd_password_file=tmp_path / "password",
        tls=tls,
        api_keys=tmp_path / "keys.toml",
        served_model_name="helper",
        disk_bytes=64 << 20,
        extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE), ("--engine", "fake")),
        ready_timeout_s=300,
        grace_s=100,
    )


async def test_a_secured_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.cluster._EXTERNAL_ETCD_S", 60.0)
    authority = Authority(tmp_path / "authority")
    with EtcdProcess(tmp_path / "etcd", tls=authority.issue("etcd")) as etcd:
        etcd.require_users("slipstream", PASSWORD)
        config = secured(tmp_path, etcd, authority)
        assert config.api_keys is not None
        key = add_key(config.api_keys, name="anna", tenant="anna")
        async with supervised(config) as cluster:
            await _use(cluster, config, key)
            await show_status(config.run_dir, as_json=True, dial=operator_dial(config.run_dir))
            status = json.loads(capsys.readouterr().out)
            assert status["etcd_error"] is None
            assert [worker["instance"] for worker in status["workers"] if worker["status"] is None] == []
            assert [session["session"] for session in status["sessions"]] == ["s-1"]
            record = (config.run_dir / "cluster.json").read_text()
            assert PASSWORD not in record and key not in record
            assert read_record(config.run_dir).tls_files() == config.tls
    logs = "".join(path.read_text(errors="replace") for path in (config.run_dir / "logs").iterdir())
    assert key not in logs
    assert PASSWORD not in logs


async def _use(cluster: ClusterSupervisor, config: ClusterConfig, key: str) -> None:
    """A request with the key, none with TLS alone, and none once the key is revoked."""
    endpoint = cluster.record().router_grpc
    assert config.api_keys is not None
    async with AsyncClient(endpoint, api_key=key, tls=config.tls) as anna:
        assert await anna.models() == ["helper"]
        reply = await anna.chat(HELLO, session="s-1", max_tokens=4)
        assert reply.usage is not None and reply.usage.prompt_tokens > 64
        await _guess_hashes(cluster, config)
        async with AsyncClient(endpoint, tls=config.tls) as other:
            with pytest.raises(Unauthenticated, match="missing"):
                await other.models()
        async with AsyncClient(endpoint, api_key=key) as plain:
            with pytest.raises(SlipstreamError):
                await plain.models()
        later = add_key(config.api_keys, name="bert", tenant="bert")
        revoke_key(config.api_keys, "anna")
        async with asyncio.timeout(60):
            while True:
                try:
                    await anna.models()
                except Unauthenticated:
                    break
                await asyncio.sleep(0.1)
    async with AsyncClient(endpoint, api_key=later, tls=config.tls) as bert:
        assert await bert.models() == ["helper"]


async def _guess_hashes(cluster: ClusterSupervisor, config: ClusterConfig) -> None:
    """Who knows the tenant and the prompt, and not the secret, learns nothing from the kvstore."""
    endpoints = {process.role: process.endpoint for process in cluster.record().processes}
    tokens = encode_chat(Tokenizer.from_dir(config.model), HELLO).token_ids
    async with (
        dial(endpoints["prefill"], tls=config.tls) as prefill,
        dial(endpoints["kvstore"], tls=config.tls) as store,
    ):
        worker: Any = worker_pb2_grpc.WorkerServiceStub(prefill)
        fingerprint = (await worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=60)).fingerprint
        stub: Any = kvstore_pb2_grpc.KvstoreServiceStub(store)

        async def held(key: bytes) -> int:
            hashes = chain_hashes(
                tokens,
                root=fingerprint.digest,
                salt=tenant_salt("anna", key=key),
                block_tokens=fingerprint.block_tokens,
            )
            request = kvstore_pb2.LookupRequest(fingerprint=fingerprint, block_hashes=pack_hashes(hashes))
            return int((await stub.Lookup(request, timeout=60)).held_blocks)

        secret = ClusterSecret.from_file(secret_file(config.run_dir))
        async with asyncio.timeout(60):
            while await held(secret.derive(SALT_LABEL)) < len(tokens) // fingerprint.block_tokens:
                await asyncio.sleep(0.05)
        assert await held(b"") == 0
        assert await held(ClusterSecret(b"another secret of 16").derive(SALT_LABEL)) == 0


async def test_wrong_access_is_refused_by_the_name_of_its_flag(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("sk-secret anna\n")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    free = tmp_path / "free.toml"
    free.write_text("model = []\n")
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "USD"\n[[model]]\nname = "a"\ninput = 1\noutput = 1\n')
    spending = tmp_path / "spending.toml"
    add_key(spending, name="a", tenant="anna", limits=RateLimits(spend_per_day=10**12))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    user = {"etcd": "127.0.0.1:1", "etcd_user": "u"}
    base = {"run_dir": tmp_path / "run", "model": small_model(tmp_path / "model"), "draft_model": None}
    wrong = (
        ({"api_keys": keys}, "--api-keys: .*keys.toml:1"),
        ({"shared_prefix": tmp_path / "missing"}, "--shared-prefix: .* cannot be read"),
        ({"shared_prefix": empty}, "--shared-prefix: .*empty.txt is empty"),
        ({"shared_prefix": Path("/dev/zero")}, "--shared-prefix: /dev/zero: cannot be read: is no reg"),
        ({"prices": tmp_path / "missing"}, "--prices: .*missing: cannot be read: No such file"),
        ({"prices": keys}, "--prices: .*keys.toml: is not TOML"),
        ({"prices": free}, r"--prices: .*free.toml: currency must be a code of three letters"),
        ({"prices": prices}, "--prices: .*prices.toml: has no price of the model model$"),
        ({"prices": prices, "served_model_name": "b,c"}, "--prices: .*: has no price of the model b$"),
        ({"served_model_name": "b,b"}, "--served-model-name: 'b,b' is not NAME"),
        ({"served_model_name": "b,--x"}, "--served-model-name: 'b,--x' has a name that begins with -"),
        ({"allowed_hosts": "???"}, "--allowed-hosts: '\\?\\?\\?' is not a host name"),
        ({"cors_origins": "page"}, "--cors-origins: 'page' is not SCHEME://HOST"),
        ({"api_keys": spending}, "--api-keys: .*spending.toml: limits of spend need a router's --prices"),
        (
            {"etcd_password_file": tmp_path / "missing", **user},
            "--etcd-password-file: .*cannot be read: No",
        ),
        ({"etcd_password_file": tmp_path, **user}, "--etcd-password-file: .*: cannot be read: is no regular"),
        ({"etcd_password_file": empty, **user}, "--etcd-password-file: .*empty.txt is empty"),
        ({"etcd_password_file": binary, **user}, "--etcd-password-file: .*binary:1: is not UTF-8"),
        ({"tls_client_ca": empty}, "--tls-client-ca: needs --tls-ca, --tls-certificate and --tls-key"),
        ({"log_format": "xml"}, "--log-format: must be one of text, json, not 'xml'"),
        ({"access_log": "json"}, "--access-log: must be one of on, off, not 'json'"),
        ({"etcd_ca": keys}, "--etcd-ca, --etcd-user: need --etcd"),
        ({"etcd": "127.0.0.1:1", "etcd_user": "u"}, "--etcd-user, --etcd-password-file: go together"),
        ({"etcd": "127.0.0.1:1", "etcd_ca": tmp_path / "missing"}, "--etcd-ca: .* cannot be read"),
    )
    for change, words in wrong:
        with pytest.raises(InvalidArgument, match=words) as refused:
            async with supervised(
                ClusterConfig(**base, **change),  # type: ignore[arg-type]
                say=lambda line: None,
            ):
                pass
        assert "sk-secret" not in refused.value.message
