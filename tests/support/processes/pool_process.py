"""`mooncake_master` for tests, on free loopback ports."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from supervisor.pool import master_binary, master_command
from tests.support.network.ports import own_ports
from tests.support.processes.process_checks import suspend


class PoolMaster:
    """A master process; without etcd its state ends with it. `start` may be called again."""

    def __init__(self, directory: Path, *, client_ttl_s: int = 3, etcd: str | None = None) -> None:
        self.port, self._metrics_port = own_ports(2)
        self._log = directory / "pool-master.log"
        self._client_ttl_s = client_ttl_s
        self._etcd = etcd
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}" if self._etcd is None else f"etcd://{self._etcd}"

    @property
    def admin(self) -> str:
        """The address of the HTTP interface."""
        return f"127.0.0.1:{self._metrics_port}"

    def start(self) -> None:
        command = master_command(
            master_binary(),
            port=self.port,
            metrics_port=self._metrics_port,
            etcd=self._etcd,
            client_ttl_s=self._client_ttl_s,
        )
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.02)

    def suspend(self) -> None:
        """SIGSTOP: connections stay open without answers. Returns when every thread has stopped."""
        assert self.process is not None
        suspend(self.process)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=100)
            self.process = None
