"""The tables of jobs. Bodies have tables apart, so that a change of state writes a short row."""

from __future__ import annotations

from libs.database.schema import Schema

_JOBS = """CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY,
  tenant TEXT NOT NULL,
  group_id TEXT NOT NULL,
  reference TEXT NOT NULL,
  idempotency_key TEXT,
  request_digest TEXT NOT NULL,
  prefix_key TEXT NOT NULL,
  path TEXT NOT NULL,
  state TEXT NOT NULL,
  owner TEXT NOT NULL,
  attempt BIGINT NOT NULL,
  failures BIGINT NOT NULL,
  status BIGINT NOT NULL,
  error TEXT NOT NULL,
  output_tokens BIGINT NOT NULL,
  stored_bytes BIGINT NOT NULL,
  created_unix_s DOUBLE PRECISION NOT NULL,
  started_unix_s DOUBLE PRECISION NOT NULL,
  ended_unix_s DOUBLE PRECISION NOT NULL,
  not_before_unix_s DOUBLE PRECISION NOT NULL,
  expires_unix_s DOUBLE PRECISION NOT NULL,
  retention_s DOUBLE PRECISION NOT NULL,
  webhook_url TEXT,
  webhook_secret TEXT
)"""

JOB_SCHEMA = Schema(
    "jobs",
    (
        (
            _JOBS,
            "CREATE TABLE IF NOT EXISTS job_requests (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
            "CREATE TABLE IF NOT EXISTS job_results (id TEXT PRIMARY KEY, body BLOB NOT NULL)",
            # What a tenant has, so that its limits cost no count.
            "CREATE TABLE IF NOT EXISTS job_tenants"
            " (tenant TEXT PRIMARY KEY, live BIGINT NOT NULL, stored_bytes BIGINT NOT NULL)",
            # Routers that run jobs. Others watch the heartbeat `beat`; a router that is not here owns no job.
            "CREATE TABLE IF NOT EXISTS job_owners (owner TEXT PRIMARY KEY, beat BIGINT NOT NULL)",
            # Webhooks to send.
            "CREATE TABLE IF NOT EXISTS job_notices (id TEXT PRIMARY KEY, url TEXT NOT NULL,"
            " secret TEXT NOT NULL, body BLOB NOT NULL, tries BIGINT NOT NULL,"
            " not_before_unix_s DOUBLE PRECISION NOT NULL, made_unix_s DOUBLE PRECISION NOT NULL)",
            "CREATE UNIQUE INDEX IF NOT EXISTS jobs_by_key ON jobs (tenant, idempotency_key)"
            " WHERE idempotency_key IS NOT NULL",
            "CREATE INDEX IF NOT EXISTS jobs_queued ON jobs (tenant, not_before_unix_s, id)"
            " WHERE state = 'queued'",
            "CREATE INDEX IF NOT EXISTS jobs_queued_by_prefix ON jobs (tenant, prefix_key, id)"
            " WHERE state = 'queued'",
            "CREATE INDEX IF NOT EXISTS jobs_running ON jobs (owner, id) WHERE state = 'running'",
            "CREATE INDEX IF NOT EXISTS jobs_live ON jobs (expires_unix_s)"
            " WHERE state IN ('queued', 'running')",
            "CREATE INDEX IF NOT EXISTS jobs_ended ON jobs ((ended_unix_s + retention_s))"
            " WHERE ended_unix_s > 0",
            "CREATE INDEX IF NOT EXISTS jobs_of_group ON jobs (tenant, group_id, id)",
            "CREATE INDEX IF NOT EXISTS job_notices_due ON job_notices (not_before_unix_s)",
        ),
        # What operators count and list, of all tenants.
        (
            "CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, id)",
            "CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended_unix_s) WHERE ended_unix_s > 0",
        ),
        # In hexadecimal: the key whose limits count for the job, and whose end is the job's.
        ("ALTER TABLE jobs ADD COLUMN key_sha256 TEXT NOT NULL DEFAULT ''",),
        # Whose webhooks are due at which receivers, so that no receiver takes the places of others.
        (
            "ALTER TABLE job_notices ADD COLUMN tenant TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE job_notices ADD COLUMN host TEXT NOT NULL DEFAULT ''",
            "CREATE INDEX IF NOT EXISTS job_notices_by_receiver"
            " ON job_notices (tenant, host, not_before_unix_s)",
        ),
        # Of a running job, as of its router's last heartbeat: whether it waits for live requests.
        ("ALTER TABLE jobs ADD COLUMN is_held BIGINT NOT NULL DEFAULT 0",),
        # Lists and counts read these indexes: the wanted jobs of one tenant alone.
        (
            "CREATE INDEX IF NOT EXISTS jobs_of_tenant ON jobs (tenant, id)",
            "CREATE INDEX IF NOT EXISTS jobs_of_tenant_by_state ON jobs (tenant, state, id)",
            "CREATE INDEX IF NOT EXISTS jobs_of_group_by_state ON jobs (tenant, group_id, state, id)",
            # With the state as one more column that is equal, SQLite prefers it to those above.
            "DROP INDEX IF EXISTS jobs_queued_by_prefix",
            "CREATE INDEX IF NOT EXISTS jobs_queued_alike ON jobs (tenant, prefix_key, state, id)"
            " WHERE state = 'queued'",
            # Webhooks that wait are bounded with the jobs that have not ended.
            "ALTER TABLE job_tenants ADD COLUMN notices BIGINT NOT NULL DEFAULT 0",
            "UPDATE job_tenants SET notices ="
            " (SELECT COUNT(*) FROM job_notices WHERE job_notices.tenant = job_tenants.tenant)",
        ),
    ),
)
