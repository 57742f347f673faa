"""The tables of files and batches."""

from __future__ import annotations

from libs.database.schema import Schema

SCHEMA = Schema(
    "batches",
    (
        (
            "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL,"
            " purpose TEXT NOT NULL, n_bytes BIGINT NOT NULL, is_whole BIGINT NOT NULL,"
            " created_unix_s DOUBLE PRECISION NOT NULL, expires_unix_s DOUBLE PRECISION NOT NULL)",
            "CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, id)",
            "CREATE INDEX IF NOT EXISTS files_expiry ON files (expires_unix_s)",
            "CREATE TABLE IF NOT EXISTS file_chunks (file_id TEXT NOT NULL, position BIGINT NOT NULL,"
            " content BLOB NOT NULL, PRIMARY KEY (file_id, position))",
            # `record` has every field as JSON; the other columns are those that statements look for.
            "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
            " state TEXT NOT NULL, input_file TEXT NOT NULL, record TEXT NOT NULL, lease TEXT NOT NULL,"
            " lease_until_unix_s DOUBLE PRECISION NOT NULL, ended_unix_s DOUBLE PRECISION)",
            "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, id)",
            "CREATE INDEX IF NOT EXISTS batches_to_do ON batches (state, lease_until_unix_s)",
            "CREATE INDEX IF NOT EXISTS batches_of_file ON batches (input_file)",
        ),
    ),
)
