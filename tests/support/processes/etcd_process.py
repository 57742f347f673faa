"""A real etcd of one member for tests: start, kill -9, stop and continue, compact.

with EtcdProcess(tmp_path / "etcd") as etcd:
    client = EtcdClient([etcd.endpoint])
    etcd.kill(); etcd.start()
"""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from slipstream.rpc.tls import TlsFiles
from supervisor.etcd import COMPACTION_RETENTION, etcd_binary, etcd_command
from tests.support.network.ports import own_ports
from tests.support.processes.process_checks import suspend


def free_port() -> int:
    """A loopback port without a listener."""
    return own_ports(1)[0]


class EtcdProcess:
    """etcd on fixed loopback ports, so that a restart has the same endpoint."""

    def __init__(
        self,
        data_dir: Path,
        *extra_arguments: str,
        compaction: str = COMPACTION_RETENTION,
        tls: TlsFiles | None = None,
    ) -> None:
        """`tls`: clients reach it by mutual TLS only."""
        self.tls = tls
        self._data_dir = data_dir
        self._compaction = compaction
        self._extra_arguments = extra_arguments
        self._client_port, self._peer_port = own_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"127.0.0.1:{self._client_port}"

    def __enter__(self) -> EtcdProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, *, timeout_s: float = 100.0) -> None:
        """Start on the existing data, if any; returns when etcd is healthy."""
        command = etcd_command(
            etcd_binary(),
            data_dir=self._data_dir,
            client_port=self._client_port,
            peer_port=self._peer_port,
            compaction=self._compaction,
        )
        # fsync protects against a crash of the machine, which no test causes, and is slow on a shared disk.
        command += ["--unsafe-no-fsync", *self._extra_arguments]
        if self.tls is not None:
            command = [
                part.replace(f"http://{self.endpoint}", f"https://{self.endpoint}") for part in command
            ]
            command += [f"--cert-file={self.tls.certificate}", f"--key-file={self.tls.key}"]
            command += [f"--trusted-ca-file={self.tls.ca}", "--client-cert-auth"]
        log_path = self._data_dir.with_suffix(".log")
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"etcd did not start: {log_path.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL; the data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Delete the data of a killed etcd."""
        shutil.rmtree(self._data_dir)

    def suspend(self) -> None:
        """SIGSTOP: connections stay open without answers. Returns when every thread has stopped."""
        assert self._process is not None
        suspend(self._process)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ctl(self, *arguments: str, timeout_s: float = 100.0) -> str:
        """Run etcdctl against this member, without a proxy; returns its output."""
        command = [str(etcd_binary().with_name("etcdctl")), *arguments]
        if self.tls is None:
            command.append(f"--endpoints={self.endpoint}")
        else:
            command += [f"--endpoints=https://{self.endpoint}", f"--cacert={self.tls.ca}"]
            command += [f"--cert={self.tls.certificate}", f"--key={self.tls.key}"]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=True, env=environment
        )
        return done.stdout

    def require_users(self, user: str, password: str) -> None:
        """Require logins: `user` and root have the password, and `user` reaches Slipstream's keys only."""
        self.ctl("user", "add", f"root:{password}")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "slipstream")
        self.ctl("role", "grant-permission", "slipstream", "--prefix", "readwrite", "/slipstream/v1/")
        self.ctl("user", "add", f"{user}:{password}")
        self.ctl("user", "grant-role", user, "slipstream")
        self.ctl("auth", "enable")

    def _healthy(self) -> bool:
        url, context = f"http://{self.endpoint}/health", None
        if self.tls is not None:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            context.load_cert_chain(self.tls.certificate, self.tls.key)
            url = f"https://{self.endpoint}/health"
        try:
            with urllib.request.urlopen(url, timeout=1, context=context) as response:
                return b"true" in response.read()
        except (urllib.error.URLError, OSError):
            return False
