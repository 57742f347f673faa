"""`slipstream keys`: API keys of a router's file; the scrape token and the console key."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import AsJson, warn_of_exposure
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, add_key, new_key, read_keys, revoke_key
from slipstream.errors import FailedPrecondition, InvalidArgument
from slipstream.metering.rate_limits import LIMIT_FIELDS, RateLimits, parse_limits

_MAX_DIGITS = 20

keys_app = typer.Typer(
    help="Make, list and revoke the API keys of a router. Routers follow the file.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)

KeyFile = Annotated[
    Path, typer.Option("--file", envvar="SLIPSTREAM_API_KEYS", help="File of keys, as a router's --api-keys.")
]
SecretFile = Annotated[
    Path,
    typer.Option(
        "--cluster-secret-file",
        envvar="SLIPSTREAM_CLUSTER_SECRET_FILE",
        help="File with the cluster's secret.",
    ),
]


@keys_app.command("new")
def new(
    file: KeyFile,
    name: Annotated[str, typer.Option(help="Name of the key, to list and revoke it.")],
    tenant: Annotated[str, typer.Option(help="Tenant whose requests and KV the key reaches.")],
    scope: Annotated[KeyScope, typer.Option(help="What the key may do.")] = KeyScope.TENANT,
    expires: Annotated[
        str | None, typer.Option(help="End of the key, as 2027-01-31 or 2027-01-31T12:00:00Z (UTC).")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help=f"NAME=NUMBER, may repeat; names: {', '.join(LIMIT_FIELDS)}.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="New file (mode 0600) for the key, as --api-key-file takes it; default: print it."),
    ] = None,
) -> None:
    """Make a key, print it once or write it to --output, and keep its hash."""
    expires_s = None if expires is None else _unix_s(expires)
    if expires_s is not None and expires_s <= time.time():
        raise InvalidArgument("--expires", "must be in the future")
    limits = _limits(limit or [])
    key = new_key()
    with contextlib.nullcontext() if output is None else _writing_key(output, key):
        add_key(file, name=name, tenant=tenant, scope=scope, expires_s=expires_s, limits=limits, key=key)
    print(key if output is None else f"the key {name} is in {output}")


@keys_app.command("scrape-token")
def show_scrape_token(secret_file: SecretFile) -> None:
    """Print the token with which Prometheus reads the metrics of every process, and nothing else."""
    from slipstream.rpc.cluster_secret import ClusterSecret
    from slipstream.rpc.scrape_token import scrape_token

    warn_of_exposure("--cluster-secret-file", secret_file)
    try:
        print(scrape_token(ClusterSecret.from_file(secret_file)))
    except ValueError as error:
        raise FailedPrecondition(str(error)) from None


@keys_app.command("console-key")
def show_console_key(secret_file: SecretFile) -> None:
    """Print the key with which the console's pages drain workers, and read where the port is not loopback."""
    from slipstream.rpc.cluster_secret import ClusterSecret
    from slipstream.rpc.console_key import console_key

    warn_of_exposure("--cluster-secret-file", secret_file)
    try:
        print(console_key(ClusterSecret.from_file(secret_file)))
    except ValueError as error:
        raise FailedPrecondition(str(error)) from None


@keys_app.command("list")
def show(file: KeyFile, as_json: AsJson = False) -> None:
    """List the keys: names, tenants, scopes, ends and limits."""
    try:
        records = read_keys(file)
    except ValueError as error:
        raise FailedPrecondition(str(error)) from None
    rows = [_row(record, time.time()) for record in records]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from slipstream.cli.tables import cell, figures_table, print_table

    if not rows:
        print("no keys")
        return
    table = figures_table(("key", "tenant", "scope", "expires", "limits"), ())
    for row in rows:
        ends = f"{row['expires'] or 'never'}{' (expired)' if row['is_expired'] else ''}"
        texts = (row["name"], row["tenant"], row["scope"], ends, ", ".join(row["limits"]) or "none")
        table.add_row(*(cell(str(text)) for text in texts))
    print_table(table)


@keys_app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    file: KeyFile,
) -> None:
    """Remove a key. Routers refuse it within two seconds; answers that run go on."""
    revoke_key(file, name)
    print(f"revoked {name}")


@contextlib.contextmanager
def _writing_key(path: Path, key: str) -> Iterator[None]:
    """Write the key before the block, which lets it count; where the block fails, the file goes.

    Raises InvalidArgument for a path that exists or cannot be written, before the key counts.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidArgument("--output", f"{path} exists, and no key is replaced: name a new file") from None
    except OSError as error:
        raise InvalidArgument("--output", f"{path} cannot be written: {error.strerror}") from None
    try:
        try:
            with os.fdopen(file, "w", encoding="ascii") as writer:
                os.fchmod(file, 0o600)  # the umask may take more
                writer.write(key + "\n")
                writer.flush()
                os.fsync(file)
        except OSError as error:
            raise InvalidArgument("--output", f"{path} cannot be written: {error.strerror}") from None
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _row(record: KeyRecord, now_s: float) -> dict[str, Any]:
    expires = None if record.expires_s is None else datetime.fromtimestamp(record.expires_s, UTC).isoformat()
    return {
        "name": record.name,
        "tenant": record.tenant,
        "scope": str(record.scope),
        "expires": expires,
        "is_expired": record.is_expired(now_s),
        "limits": record.limits.lines(),
    }


def _limits(given: Sequence[str]) -> RateLimits:
    """The limits of the flags. Raises InvalidArgument."""
    table: dict[str, object] = {}
    for item in given:
        name, _, text = item.partition("=")
        if name not in LIMIT_FIELDS or name in table:
            raise InvalidArgument("--limit", f"must be NAME=NUMBER, each once, of {', '.join(LIMIT_FIELDS)}")
        is_whole = text.isascii() and text.isdigit()
        table[name] = int(text) if is_whole and len(text) < _MAX_DIGITS else text
    try:
        return parse_limits(table)
    except ValueError as error:
        raise InvalidArgument("--limit", str(error)) from None


def _unix_s(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument("--expires", "must be a date, or a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
