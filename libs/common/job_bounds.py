"""The bounds of what a client submits as jobs. Pure; docs/bounds.md shows them."""

from __future__ import annotations

from slipstream.bound import Range, Rule, Section, Size

MAX_SUBMITTED_JOBS = 500
MAX_JOBS_PAGE = 1000
# Of a result in one answer: gRPC sends a message in one piece on the event loop.
MAX_RESULT_PART_BYTES = 8 << 20
# Deliveries of one router, and of these to one host for one tenant; what is read of an answer.
WEBHOOKS_AT_ONCE, TENANT_WEBHOOKS_TO_HOST = 32, 4
WEBHOOK_ANSWER_BYTES = 16 << 10

JOBS = Section("Jobs")
SUBMITTED = JOBS.add(Size("jobs", 1, MAX_SUBMITTED_JOBS, "jobs in one call", apis="gRPC"))
PATH = JOBS.add(Rule("jobs[i].path", "must be one of {paths}", apis="gRPC"))
STREAM = JOBS.add(Rule("jobs[i].body.stream", "is not for a job or a batch: the answer is stored whole"))
BACKGROUND = JOBS.add(
    Rule("jobs[i].body.background", "is not for a job or a batch, which run in the background")
)
REFERENCE = JOBS.add(Size("jobs[i].reference", 0, 512, "characters", apis="gRPC"))
GROUP = JOBS.add(Size("jobs[i].group_id", 0, 128, "characters", apis="gRPC"))
# Of batches and of queued runs, which count the jobs of their groups.
BATCH_GROUP, RUN_GROUP = "batch_", "run_"
RESERVED_GROUPS = (BATCH_GROUP, RUN_GROUP)
RESERVED_GROUP = JOBS.add(Rule("jobs[i].group_id", "must not begin with batch_ or run_", apis="gRPC"))
ENDED_GROUP = JOBS.add(
    Rule(
        "group_id",
        "names the jobs of a batch or of queued runs: CancelBatch ends a batch",
        "Of CancelJobs.",
        apis="gRPC",
    )
)
KEY = JOBS.add(Size("jobs[i].idempotency_key", 0, 128, "characters", apis="gRPC"))
_DAY_MS = 86_400_000
EXPIRES_MS = JOBS.add(Range("jobs[i].expires_ms", 1000, 7 * _DAY_MS, whole=True, apis="gRPC"))
RETENTION_MS = JOBS.add(Range("jobs[i].retention_ms", 1000, 30 * _DAY_MS, whole=True, apis="gRPC"))
WEBHOOK = JOBS.add(Rule("jobs[i].webhook", "{reason}", apis="gRPC"))
PAGE = JOBS.add(Range("limit", 0, MAX_JOBS_PAGE, "0 = 100.", whole=True, apis="gRPC"))
RESULT_OFFSET = JOBS.add(Range("result_offset", 0, 1 << 30, whole=True, apis="gRPC"))
RESULT_LIMIT = JOBS.add(
    Range("result_limit", 0, MAX_RESULT_PART_BYTES, "0 = all that follow.", whole=True, apis="gRPC")
)
RESULT_PARTS = JOBS.add(
    Rule(
        "result_limit",
        f"must be given where more than {MAX_RESULT_PART_BYTES} bytes of the result follow: read it in parts",
        "The SDK reads in parts.",
        apis="gRPC",
    )
)
LISTED_STATE = JOBS.add(Rule("state", "is not known", apis="gRPC"))
AFTER = JOBS.add(Rule("after_id", "is no id of a job", apis="gRPC"))
NAMED = JOBS.add(Rule("id", "must be given, or group_id", apis="gRPC"))

WEBHOOKS_ROW = (
    "Webhooks at a time: of one router / of one tenant to one host / bytes read of an answer",
    f"{WEBHOOKS_AT_ONCE} / {TENANT_WEBHOOKS_TO_HOST} / {WEBHOOK_ANSWER_BYTES}",
    "others wait / others wait / failed",
)
