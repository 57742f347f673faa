"""The file of API keys: hashes at rest, atomic changes, errors without secrets."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from slipstream.bounds import MAX_KEY_FILE_BYTES
from slipstream.credentials.api_key_file import (
    KeyRecord,
    KeyScope,
    add_key,
    format_keys,
    key_hash,
    parse_key_file,
    read_key_file,
    read_keys,
    revoke_key,
)
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.metering.money import PICO
from slipstream.metering.rate_limits import NO_LIMITS, RateLimits

SECRET = "sk-slipstream-do-not-show-me"
HASH = key_hash(SECRET).hex()
GOOD = f'[[key]]\nname = "a"\ntenant = "t"\nsha256 = "{HASH}"\n'


def test_a_new_key_is_kept_as_its_hash_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run" / "keys.toml"
    path.parent.mkdir()
    key = add_key(path, name="laptop", tenant="anna", expires_s=2e9)
    other = add_key(path, name="root", tenant="ops", scope=KeyScope.OPERATOR)
    assert key != other and len(key) > 50
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == (
        KeyRecord("laptop", "anna", KeyScope.TENANT, key_hash(key), 2e9),
        KeyRecord("root", "ops", KeyScope.OPERATOR, key_hash(other)),
    )
    assert [path.name for path in path.parent.iterdir()] == ["keys.toml"]


def test_a_key_is_revoked_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for name in ("a", "b"):
        add_key(path, name=name, tenant="t")
    revoke_key(path, "a")
    assert [record.name for record in read_keys(path)] == ["b"]
    with pytest.raises(NotFound, match="no key 'a'"):
        revoke_key(path, "a")


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    names = [f"key-{n}" for n in range(12)]
    threads = [
        threading.Thread(target=add_key, args=(path,), kwargs={"name": n, "tenant": "t"}) for n in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(record.name for record in read_keys(path)) == sorted(names)


def test_a_taken_or_odd_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, name="a", tenant="t")
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match="--name"):
        add_key(path, name="a", tenant="other")
    with pytest.raises(InvalidArgument, match="--name"):
        add_key(path, name='x"\n', tenant="t")
    with pytest.raises(InvalidArgument, match="--tenant"):
        add_key(path, name="b", tenant="a b")
    assert path.read_bytes() == before


def test_a_broken_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{SECRET} anna\n")
    with pytest.raises(FailedPrecondition, match="keys:1"):
        add_key(path, name="a", tenant="t")
    assert path.read_text() == f"{SECRET} anna\n"


def test_limits_of_keys_and_tenants_are_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    limits = RateLimits(60, 100_000, 8, spend_per_day=5 * PICO // 2, spend_per_month=PICO // 10**6)
    add_key(path, name="a", tenant="anna", limits=limits)
    with path.open("a") as file:
        file.write('\n[[tenant]]\nname = "anna"\nspend_per_month = 99.5\n')
    add_key(path, name="b", tenant="anna")
    found = read_key_file(path)
    assert [record.limits for record in found.keys] == [limits, NO_LIMITS]
    assert found.tenants == {"anna": RateLimits(spend_per_month=199 * PICO // 2)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("requests_per_minute = 0", "keys:5: requests_per_minute must be a whole number from 1"),
        ("requests_per_minute = 1.5", "keys:5: requests_per_minute must be a whole number"),
        ("tokens_per_minute = true", "keys:5: tokens_per_minute must be a whole number"),
        ("concurrent_requests = 1_000_000_000_001", "keys:5: concurrent_requests must be a whole number"),
        ("spend_per_day = 0", "keys:5: spend_per_day must be above 0"),
        ("spend_per_day = -1", "keys:5: spend_per_day must be a number from 0"),
        ("spend_per_day = inf", "keys:5: spend_per_day must be a number from 0"),
        ("spend_per_month = 0.0000001", "keys:5: spend_per_month must have at most 6 decimals"),
        ("spend_per_month = 1_000_001", "keys:5: spend_per_month must be above 0 and at most 1000000"),
        ("requests_per_hour = 1", "keys:5: has an unknown field"),
        ('sha256 = "0"', "keys:5: has an unknown field"),
        ('[[tenant]]\nname = "t"', "keys:7: repeats the name of an earlier tenant"),
        ('[[tenant]]\nname = "a b"', "keys:7: name must be text"),
    ],
)
def test_a_wrong_limit_names_its_line_and_field(line: str, said: str) -> None:
    text = f'[[tenant]]\nname = "t"\n\n\n[[tenant]]\nname = "u"\n{line}\n'
    with pytest.raises(ValueError, match=f"^{said}"):
        parse_key_file(text, source="keys")


def test_what_is_written_is_read_again() -> None:
    records = (
        KeyRecord("a", "t/1", KeyScope.TENANT, key_hash("1"), 1_800_000_000.0),
        KeyRecord("b", "t", KeyScope.OPERATOR, key_hash("2")),
    )
    assert parse_key_file(format_keys(records), source="f").keys == records
    assert parse_key_file(format_keys(()), source="f").keys == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"# keys\n{SECRET} anna\n", 2),
        (f'{GOOD}\n[[key]]\nname = "b"\ntenant = "t"\nsha256 = "{SECRET}"\n', 6),
        (f'{GOOD}{SECRET} = "t"\n', 1),
        (f'{GOOD}key = "{SECRET}"\n', 1),
        (f'"{SECRET}" = 1\n{GOOD}', 1),
        (f'key = "{SECRET}"\n', 1),
        (f'key = ["{SECRET}"]\n', 1),
        (f'{GOOD}scope = "{SECRET}"\n', 1),
        (f'{GOOD}expires = "{SECRET}"\n', 1),
        (f"{GOOD}expires = 2027-01-01T00:00:00\n", 1),
        (f'[[key]]\nname = "{SECRET} "\ntenant = "t"\nsha256 = "{HASH}"\n', 1),
        (f'[[key]]\nname = "b"\ntenant = "{SECRET} "\nsha256 = "{HASH}"\n', 1),
        (f"{GOOD}\n{GOOD}", 6),
        (f"{GOOD}\n{GOOD.replace(chr(34) + 'a' + chr(34), chr(34) + 'b' + chr(34))}", 6),
        (f'[[key]]\nname = """\n{SECRET}\n', 4),
    ],
)
def test_an_error_names_file_and_line_and_shows_no_value(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=rf"^/etc/keys:{line}: ") as refused:
        parse_key_file(text, source="/etc/keys")
    assert "sk-slip" not in str(refused.value)
    assert HASH not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ValueError, match="keys: cannot be read"):
        read_keys(path)
    path.write_bytes(b"# one\n# \xff\n")
    with pytest.raises(ValueError, match="keys:2: is not UTF-8"):
        read_keys(path)
    path.write_bytes(b"#" * (MAX_KEY_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="has more than"):
        read_keys(path)
