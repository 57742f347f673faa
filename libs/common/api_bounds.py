"""Input bounds that only the APIs beside chat completions have; see slipstream/bounds.py. Pure."""

from __future__ import annotations

from slipstream import bounds
from slipstream.bound import Range, Rule, Section, Size

# A stored response is forgotten after this time, as OpenAI's are.
RESPONSE_TTL_S = 30 * 86_400.0
MAX_TENANT_RESPONSES = 10_000
MAX_TENANT_RESPONSE_BYTES = 1 << 30
# Reads and writes of one tenant in the database at a time: those of others wait for no more of them.
MAX_TENANT_RESPONSE_CALLS = 4
# The end of an answer waits for its save: while the database is unavailable, ends must not wait for each
# other.
RESPONSE_CALL_WAIT_S = 10.0
# Conversations that are read from the database together, for all tenants: each takes up to 100 MB meanwhile.
MAX_CONVERSATIONS_READ = 8
# Of stored responses that jobs continue or refer to, while they are checked: for one tenant.
MAX_TENANT_CHECKED_BYTES = 64 << 20
# What one tenant's clients are being sent of whole answers and stored responses, until they have taken it.
MAX_TENANT_SENT_RESPONSE_BYTES = 64 << 20

RESPONSES = Section("/v1/responses")
INPUT = RESPONSES.add(Rule("input", "must be a string or a list of items", apis="HTTP"))
INPUT_ITEMS = RESPONSES.add(Size("input", 1, 4096, "items", apis="HTTP"))
ITEM_TYPE = RESPONSES.add(
    Rule(
        "input[i].type",
        "{kind} is not served here: items are message, function_call, function_call_output, reasoning and "
        "item_reference",
        apis="HTTP",
    )
)
ITEM_ROLE = RESPONSES.add(Rule("input[i].role", "must be user, assistant, system or developer", apis="HTTP"))
PART_TYPE = RESPONSES.add(
    Rule("input[i].content[j].type", "{kind} is not served here: parts are {allowed}", apis="HTTP")
)
HOSTED_TOOL = RESPONSES.add(
    Rule("tools[i].type", "{kind} is not served here: the client runs tools of type function", apis="HTTP")
)
RESPONSES_CHOICE = RESPONSES.add(
    Rule("tool_choice", "must be none, auto, required, a function or allowed_tools", apis="HTTP")
)
TEXT_FORMAT = RESPONSES.add(Rule("text.format.type", "must be text, json_object or json_schema", apis="HTTP"))
EFFORT = RESPONSES.add(
    Rule(
        "reasoning.effort",
        "must be one of none, minimal, low, medium, high, xhigh, max, default, auto",
        "none: no reasoning; default, auto: the model's choice.",
        "HTTP",
    )
)
SUMMARY = RESPONSES.add(
    Rule("reasoning.summary", "must be one of auto, concise, detailed, none", apis="HTTP")
)
TRUNCATION = RESPONSES.add(
    Rule("truncation", "must be disabled: items that do not fit are refused, not dropped", apis="HTTP")
)
NO_STORE = RESPONSES.add(
    Rule(
        "store",
        "needs a database: this router runs without --database",
        "Also previous_response_id, item_reference. Default: stored if there is a database.",
    )
)
STORED_CHAT = RESPONSES.add(Rule("store", "needs messages", "Also previous_response_id.", "gRPC"))
STORED_ONE = RESPONSES.add(Rule("store", "is only for a request with one answer", apis="gRPC"))
STORED_WHOLE = RESPONSES.add(Rule("resume_after_tokens", "must be left out with store", apis="gRPC"))
STORED_MESSAGE = RESPONSES.add(
    Rule("messages[i].name", "must be left out with store", "Also partial.", "gRPC")
)
RESPONSE_ROWS = RESPONSES.add(Size("top_logprobs", 0, 32 << 20, "bytes of log probabilities"))
STORED = RESPONSES.add(
    Size(
        "store",
        0,
        4 * bounds.MAX_BODY_BYTES,
        "bytes of JSON in a response that is stored",
        "Without store=true or background, such an answer is not stored.",
    )
)
REFERENCES = RESPONSES.add(
    Size("input", 0, 64, "earlier responses with items that are referred to", apis="HTTP")
)
REFERRED = RESPONSES.add(
    Size(
        "input",
        0,
        64 << 20,
        "bytes of JSON in the stored responses that one body, or all jobs of one call, continue or refer to",
        "Each counts whole.",
    )
)
CONVERSATION = RESPONSES.add(
    Size(
        "previous_response_id",
        0,
        bounds.MAX_BODY_BYTES,
        "bytes in the conversation that goes on, and in the items that input refers to",
        "The bound of a body's structure holds too.",
    )
)
BACKGROUND = RESPONSES.add(
    Rule(
        "background",
        "needs POST /v1/responses of a router with --database, and store that is not false",
        apis="HTTP",
    )
)
BACKGROUND_CANCEL = RESPONSES.add(Rule("response_id", "must be of a response in the background"))
BACKGROUND_DELETE = RESPONSES.add(
    Rule("response_id", "must be of a response that has ended: cancel it first")
)
BACKGROUND_STREAM = RESPONSES.add(Rule("stream", "is only for responses in the background", apis="HTTP"))
BACKGROUND_PREVIOUS = RESPONSES.add(
    Rule("previous_response_id", "names a response that is {status}: one that has an answer can be continued")
)
STARTING_AFTER = RESPONSES.add(Range("starting_after", 0, 1 << 31, whole=True, apis="HTTP"))
STARTING_AFTER_LAST = RESPONSES.add(
    Rule(
        "starting_after",
        "is beyond the last event of this response, which has number {last}",
        "The last one gives an empty stream; a running response is waited for.",
        "HTTP",
    )
)
STARTING_AFTER_STREAM = RESPONSES.add(Rule("starting_after", "needs stream=true", apis="HTTP"))
PAGE_LIMIT = RESPONSES.add(Range("limit", 1, 100, "Input items of a page; gRPC: 0 = 20.", whole=True))
PAGE_ORDER = RESPONSES.add(Rule("order", "must be asc or desc", apis="HTTP"))

MESSAGES = Section("/v1/messages")
MESSAGES_ROLE = MESSAGES.add(Rule("messages[i].role", "must be user, assistant or system", apis="HTTP"))
BLOCK = MESSAGES.add(
    Rule("messages[i].content[j].type", "{kind} is not supported here: blocks are {allowed}", apis="HTTP")
)
PREFILL = MESSAGES.add(
    Rule(
        "messages[i].content",
        "must be text without white space at its end where the answer continues it",
        apis="HTTP",
    )
)
PREFILL_THINKING = MESSAGES.add(
    Rule("thinking", "must be disabled where the answer continues the last message", apis="HTTP")
)
MAX_TOKENS = MESSAGES.add(Rule("max_tokens", "must be given", apis="HTTP"))
THINKING = MESSAGES.add(
    Rule(
        "thinking.type",
        "must be enabled, adaptive or disabled",
        "Default: disabled. `budget_tokens` bounds nothing.",
        "HTTP",
    )
)
BUDGET = MESSAGES.add(
    Rule("thinking.budget_tokens", "must be a whole number from 1024 to max_tokens", apis="HTTP")
)
SERVER_TOOL = MESSAGES.add(
    Rule("tools[i].type", "{kind} is not served here: the client runs tools of type custom", apis="HTTP")
)
MESSAGES_CHOICE = MESSAGES.add(Rule("tool_choice.type", "must be auto, any, tool or none", apis="HTTP"))
OUTPUT_FORMAT = MESSAGES.add(Rule("output_config.format.type", "must be json_schema", apis="HTTP"))
OUTPUT_EFFORT = MESSAGES.add(
    Rule("output_config.effort", "must be one of low, medium, high, xhigh, max", apis="HTTP")
)
EDITS = MESSAGES.add(
    Rule(
        "context_management.edits[i].type",
        "{kind} is not supported here: the client edits its history",
        "clear_thinking_20251015 is accepted.",
        "HTTP",
    )
)

# aiohttp's look-up of a path takes time by the square of its slashes, before any key is checked.
MAX_TARGET_BYTES = 2048

API_SECTIONS = (RESPONSES, MESSAGES)
ROWS: tuple[tuple[str, str, str], ...] = (
    ("Path and query of an HTTP request", f"{MAX_TARGET_BYTES} bytes", "431, and the connection closes"),
    (
        "Stored responses of one tenant: number / compressed bytes",
        f"{MAX_TENANT_RESPONSES} / {MAX_TENANT_RESPONSE_BYTES}",
        "the oldest are deleted",
    ),
    ("Life of a stored response", f"{RESPONSE_TTL_S:.0f} s", "deleted"),
    (
        "Reads and writes of one tenant's stored responses",
        f"{MAX_TENANT_RESPONSE_CALLS}",
        f"others wait {RESPONSE_CALL_WAIT_S:g} s; then 429, or the answer is not stored",
    ),
    (
        "Stored responses read together to continue or refer to them: all tenants",
        f"{MAX_CONVERSATIONS_READ}",
        f"others wait {RESPONSE_CALL_WAIT_S:g} s; then 429",
    ),
    (
        "Earlier items of one tenant's jobs, checked at a time",
        f"{MAX_TENANT_CHECKED_BYTES} bytes of JSON",
        "429",
    ),
    (
        "Whole answers, stored responses, files, lists and usage on their way to one tenant",
        f"{MAX_TENANT_SENT_RESPONSE_BYTES} bytes, without those up to 64 KiB (a file: 1 MiB)",
        "429, RESOURCE_EXHAUSTED",
    ),
)
