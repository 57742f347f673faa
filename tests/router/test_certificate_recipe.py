"""The commands of docs/security.md that make certificates: services run with what they make."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from services.router.request.model_card import ModelCard
from slipstream.async_client import AsyncClient
from slipstream.credentials.secret_files import exposure
from slipstream.rpc.tls import TlsFiles
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.test_client_trust import drain_code

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PEER_NAME = "slipstream-peer"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with what the commands of the page make."""
    if shutil.which("openssl") is None or shutil.which("bash") is None:
        pytest.skip("needs the openssl command and bash")
    found = re.search(r"^### Make certificates\n.*?^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found is not None
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", found[1]],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
    )
    return tmp_path


def test_keys_are_for_their_owner(made: Path) -> None:
    keys = list(made.glob("*.key"))
    assert len(keys) == 9 and all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    assert not any(map(exposure, keys))


async def test_services_clients_and_operators_run_with_the_certificates_of_the_page(
    made: Path, model: FakeModel, card: ModelCard
) -> None:
    def files(name: str) -> TlsFiles:
        found = TlsFiles(made / "peers-ca.pem", made / f"{name}.pem", made / f"{name}.key", PEER_NAME)
        found.check()
        return found

    router_files, operator = files("router"), files("slipstream-operator")
    of_clients = replace(router_files, ca=made / "clients-ca.pem")
    async with (
        FakeCluster(model, tls=files("decode")) as cluster,
        open_router(cluster, card, tls=router_files, client_tls=of_clients) as router,
    ):
        async with AsyncClient(router.host.endpoint, tls=files("anna")) as client:
            assert (await client.chat(HELLO)).finish_reason == "stop"
        worker = cluster.decodes[0].host.endpoint
        assert await drain_code(worker, files("anna"), "GetStatus") is grpc.StatusCode.UNAVAILABLE
        assert await drain_code(router.host.endpoint, operator, "GetStatus") is grpc.StatusCode.UNAVAILABLE
        # A peer may ask and not drain; an operator may do both.
        assert await drain_code(worker, files("prefill"), "GetStatus") is grpc.StatusCode.OK
        assert await drain_code(worker, files("prefill")) is grpc.StatusCode.PERMISSION_DENIED
        assert await drain_code(worker, operator) is not grpc.StatusCode.PERMISSION_DENIED
        # The plain names of the page count as well as the one that all share.
        by_address = replace(files("prefill"), server_name="")
        assert await drain_code(worker, by_address, "GetStatus") is grpc.StatusCode.OK
