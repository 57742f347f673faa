"""The cluster's secret: where it is kept, and the keys derived from it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.rpc.cluster_secret import ClusterSecret


def test_a_new_secret_is_random_kept_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "cluster.secret"
    first = ClusterSecret.keep_in(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterSecret.keep_in(path).derive("a") == first.derive("a")
    assert ClusterSecret.keep_in(tmp_path / "other").derive("a") != first.derive("a")


def test_a_crash_leaves_no_file_without_its_secret(tmp_path: Path) -> None:
    """The process writes where nothing fits: the kernel ends it (RLIMIT_FSIZE), as a crash would."""
    path = tmp_path / "cluster.secret"
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from slipstream.rpc.cluster_secret import ClusterSecret\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "ClusterSecret.keep_in(Path(sys.argv[1]))\n"
    )
    crashed = subprocess.run([sys.executable, "-B", "-c", code, path], capture_output=True, timeout=60)
    assert crashed.returncode != 0
    assert not path.exists()
    ClusterSecret.keep_in(path)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name[0] != "."] == [path.name]


def test_each_purpose_has_a_key() -> None:
    secret = ClusterSecret(b"0123456789abcdef")
    assert len(secret.derive("a")) == 32
    assert secret.derive("a") != secret.derive("b")
    assert secret.derive("a") != ClusterSecret(b"0123456789abcdeg").derive("a")


def test_repr_shows_no_secret() -> None:
    assert "0123" not in repr(ClusterSecret(b"0123456789abcdef"))


def test_a_short_or_missing_secret_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("abc\n")
    with pytest.raises(ValueError, match="short: the cluster secret must have at least 16 bytes"):
        ClusterSecret.from_file(short)
    with pytest.raises(ValueError, match="missing cannot be read"):
        ClusterSecret.from_file(tmp_path / "missing")
