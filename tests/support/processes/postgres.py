"""A PostgreSQL server of a test, where the machine has the programs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

_START_TIMEOUT_S = 60.0


def postgres_programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


class PostgresServer:
    """One server on a Unix socket below a folder. As root it runs as user `postgres`."""

    def __init__(self, folder: Path) -> None:
        programs = postgres_programs()
        assert programs is not None
        self._programs, self._folder = programs, folder
        self._data = folder / "data"
        self._user = "postgres" if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            entry = pwd.getpwnam(self._user)
            os.chown(folder, entry.pw_uid, entry.pw_gid)
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", "slipstream", "--no-sync")

    @property
    def url(self) -> str:
        """The URL for `open_database`."""
        return f"postgresql://slipstream@/postgres?host={self._folder}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", self._data, "-k", self._folder, "-c", "listen_addresses="],
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while subprocess.run(
            [self._programs / "pg_isready", "-q", "-h", self._folder], check=False, cwd=self._folder
        ).returncode:
            assert time.monotonic() < deadline_s, "PostgreSQL does not start"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server: SIGINT cuts connections and stops cleanly, SIGQUIT stops as a crash does."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=_START_TIMEOUT_S)
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            user=self._user,
            cwd=self._folder,
            check=True,
            capture_output=True,
        )
