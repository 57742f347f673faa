"""Files that flags name: pipes, devices and large files are refused, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.common.etcd.access import EtcdAccess
from libs.common.runtime.settings import check_readable
from services.router.metering.price_list import read_prices
from slipstream.bounds import MAX_SECRET_FILE_BYTES
from slipstream.cli.options import read_api_key, read_secret
from slipstream.credentials.api_key_file import read_keys
from slipstream.credentials.bounded_file import read_bounded
from slipstream.credentials.certificates import check_authority
from slipstream.errors import SlipstreamError
from slipstream.rpc.cluster_secret import ClusterSecret
from tests.support.processes.open_files import open_files


def _password(path: Path) -> None:
    EtcdAccess("127.0.0.1:1", user="root", password_file=path)._password()


_READERS: list[Callable[[Path], object]] = [
    ClusterSecret.from_file,
    lambda path: read_api_key(None, path),
    lambda path: read_secret("NONE", path, "--webhook-secret-file"),
    _password,
    read_keys,
    read_prices,
    lambda path: check_authority(path),
]


@pytest.mark.parametrize("read", _READERS)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_a_file_without_bound_is_refused_at_once(
    tmp_path: Path, kind: str, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "given"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir(0o700)
    else:
        path.touch(0o600)
        os.truncate(path, 5 << 20)  # above the bound of each
    why = "has more than" if kind == "large" else "is no regular file"
    with pytest.raises((SlipstreamError, ValueError, OSError), match=why):
        read(path)


def test_a_regular_file_is_read_up_to_the_bound_and_behind_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "given", tmp_path / "link"
    path.write_bytes(b"x" * MAX_SECRET_FILE_BYTES)
    link.symlink_to(path)
    assert read_bounded(link) == path.read_bytes()


def test_a_refusal_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = open_files()
    for _ in range(5):
        with pytest.raises(OSError, match="is no regular file"):
            read_bounded(tmp_path)
    assert not open_files() - before


def test_a_pipe_blocks_no_check_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_readable(tmp_path / "pipe")  # its reader refuses it
