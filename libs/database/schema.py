"""The tables of one module, and the steps by which they grew."""

from __future__ import annotations

from dataclasses import dataclass

from libs.database.transaction import SqlConnection
from slipstream.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables under a name of the module. A change of a released schema is another step at the end."""

    name: str
    steps: tuple[tuple[str, ...], ...]


def read_version(connection: SqlConnection, schema: Schema) -> int:
    """How many steps the database has. Fails before the first schema is applied."""
    rows = connection.execute("SELECT version FROM slipstream_schema WHERE name = ?", (schema.name,))
    return int(rows[0][0]) if rows else 0


def apply_schema(connection: SqlConnection, schema: Schema) -> None:
    """Run the steps that the database lacks, in the open transaction. Raises FailedPrecondition."""
    connection.lock_schema()
    connection.execute(
        "CREATE TABLE IF NOT EXISTS slipstream_schema (name TEXT PRIMARY KEY, version BIGINT NOT NULL)"
    )
    version = read_version(connection, schema)
    if version > len(schema.steps):
        raise FailedPrecondition(f"the tables of {schema.name} were made by a newer release")
    for step in schema.steps[version:]:
        for statement in step:
            connection.execute(statement)
    if version < len(schema.steps):
        connection.execute(
            "INSERT INTO slipstream_schema (name, version) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET version = excluded.version",
            (schema.name, len(schema.steps)),
        )
