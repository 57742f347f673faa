"""`slipstream keys`: a key is printed once, listed by name and revoked."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.options import read_api_key
from slipstream.credentials.api_key_file import KeyScope, key_hash, read_keys
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.metering.money import PICO
from slipstream.metering.rate_limits import RateLimits
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.console_key import console_key
from slipstream.rpc.scrape_token import scrape_token


def run(*arguments: str, file: Path) -> str:
    done = CliRunner().invoke(app, ["keys", *arguments], env={"SLIPSTREAM_API_KEYS": str(file)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_life_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = run("new", "--name", "laptop", "--tenant", "anna", "--expires", "2030-01-01", file=file).strip()
    run("new", "--name", "root", "--tenant", "ops", "--scope", "operator", file=file)
    laptop, root = read_keys(file)
    assert laptop.sha256 == key_hash(key)
    assert laptop.expires_s == 1_893_456_000
    assert root.scope is KeyScope.OPERATOR
    listed = json.loads(run("list", "--json", file=file))
    assert [row["name"] for row in listed] == ["laptop", "root"]
    table = run("list", file=file)
    assert "laptop" in table and "operator" in table and "never" in table
    assert key not in table and laptop.sha256.hex() not in table
    assert run("revoke", "laptop", file=file) == "revoked laptop\n"
    assert [record.name for record in read_keys(file)] == ["root"]


def test_a_key_may_go_into_a_file_of_its_own(tmp_path: Path) -> None:
    file, output = tmp_path / "keys.toml", tmp_path / "anna.key"
    before = os.umask(0)
    try:
        said = run("new", "--name", "laptop", "--tenant", "anna", "--output", str(output), file=file)
    finally:
        os.umask(before)
    key = read_api_key(None, output)
    assert key is not None and read_keys(file)[0].sha256 == key_hash(key)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert str(output) in said and key not in said


def test_a_file_that_cannot_take_a_key_makes_none(tmp_path: Path) -> None:
    file, taken = tmp_path / "keys.toml", tmp_path / "taken.key"
    taken.write_text("another key")
    link = tmp_path / "link.key"
    link.symlink_to(tmp_path / "nowhere")
    new = ("new", "--name", "laptop", "--tenant", "anna", "--output")
    for output, words in (
        (taken, "exists, and no key is replaced"),
        (link, "exists, and no key is replaced"),
        (tmp_path / "none" / "a.key", "cannot be written: No such file"),
        (tmp_path, "exists"),
    ):
        with pytest.raises(InvalidArgument, match=f"^--output: {output} {words}"):
            run(*new, str(output), file=file)
    assert not file.exists() and taken.read_text() == "another key" and not (tmp_path / "nowhere").exists()
    run("new", "--name", "laptop", "--tenant", "anna", file=file)
    output = tmp_path / "second.key"
    with pytest.raises(InvalidArgument, match="--name: 'laptop' is the name of another key"):
        run(*new, str(output), file=file)
    assert not output.exists()


def test_the_derived_keys_are_those_of_the_cluster_secret(tmp_path: Path) -> None:
    file = tmp_path / "cluster.secret"
    secret = ClusterSecret.keep_in(file)
    for command, key in (("scrape-token", scrape_token(secret)), ("console-key", console_key(secret))):
        shown = CliRunner().invoke(app, ["keys", command, "--cluster-secret-file", str(file)])
        assert (shown.exit_code, shown.stdout) == (0, key + "\n")
    assert scrape_token(secret) != console_key(secret)


def test_a_folder_that_is_missing_is_named_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"none cannot hold the keys: No such file or directory"):
        run("new", "--name", "a", "--tenant", "t", file=tmp_path / "none" / "keys.toml")
    assert not (tmp_path / "none").exists()


def test_a_link_without_an_end_is_named(tmp_path: Path) -> None:
    link = tmp_path / "keys.toml"
    link.symlink_to(link)
    with pytest.raises(FailedPrecondition, match=r"keys.toml cannot hold the keys: it is a link without an"):
        run("new", "--name", "a", "--tenant", "t", file=link)
    assert link.is_symlink()


def test_refusals_name_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    for kind, arguments in (
        (InvalidArgument, ("new", "--name", "a", "--tenant", "t", "--expires", "soon")),
        (InvalidArgument, ("new", "--name", "a", "--tenant", "t", "--expires", "2020-01-31")),
        (InvalidArgument, ("new", "--name", "a b", "--tenant", "t")),
        (NotFound, ("revoke", "a")),
    ):
        try:
            run(*arguments, file=file)
        except kind:
            continue
        raise AssertionError(arguments)


def test_limits_are_flags_and_stand_in_the_list(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    limits = ("--limit", "requests_per_minute=60", "--limit", "spend_per_day=2.50")
    run("new", "--name", "a", "--tenant", "t", *limits, file=file)
    (record,) = read_keys(file)
    assert record.limits == RateLimits(requests_per_minute=60, spend_per_day=5 * PICO // 2)
    (row,) = json.loads(run("list", "--json", file=file))
    assert row["limits"] == ["requests_per_minute = 60", "spend_per_day = 2.5"]
    for wrong in ("rpm=1", "requests_per_minute", "requests_per_minute=x", "spend_per_day=1e99"):
        with pytest.raises(InvalidArgument, match="--limit"):
            run("new", "--name", "b", "--tenant", "t", "--limit", wrong, file=file)
