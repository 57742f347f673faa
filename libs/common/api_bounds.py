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
INPUT = RESPONSES.add(
    Rule("input", "must be a string or a list of items", "There is nothing to answer.", "HTTP")
)
INPUT_ITEMS = RESPONSES.add(Size("input", 1, 4096, "items", "As messages.", "HTTP"))
ITEM_TYPE = RESPONSES.add(
    Rule(
        "input[i].type",
        "{kind} is not served here: items are message, function_call, function_call_output, reasoning and "
        "item_reference",
        "Hosted tools do not run here.",
        "HTTP",
    )
)
ITEM_ROLE = RESPONSES.add(
    Rule("input[i].role", "must be user, assistant, system or developer", "As OpenAI's.", "HTTP")
)
PART_TYPE = RESPONSES.add(
    Rule(
        "input[i].content[j].type",
        "{kind} is not served here: parts are {allowed}",
        "The model reads text.",
        "HTTP",
    )
)
HOSTED_TOOL = RESPONSES.add(
    Rule(
        "tools[i].type",
        "{kind} is not served here: the client runs tools of type function",
        "Hosted tools do not run here.",
        "HTTP",
    )
)
RESPONSES_CHOICE = RESPONSES.add(
    Rule(
        "tool_choice",
        "must be none, auto, required, a function or allowed_tools",
        "Hosted tools do not run here.",
        "HTTP",
    )
)
TEXT_FORMAT = RESPONSES.add(
    Rule("text.format.type", "must be text, json_object or json_schema", "As OpenAI's.", "HTTP")
)
EFFORT = RESPONSES.add(
    Rule(
        "reasoning.effort",
        "must be one of none, minimal, low, medium, high, xhigh, max, default, auto",
        "All but none let the model reason; default and auto leave it to the model.",
        "HTTP",
    )
)
SUMMARY = RESPONSES.add(
    Rule("reasoning.summary", "must be one of auto, concise, detailed, none", "As OpenAI's.", "HTTP")
)
TRUNCATION = RESPONSES.add(
    Rule(
        "truncation",
        "must be disabled: items that do not fit are refused, not dropped",
        "The client knows what it can leave out.",
        "HTTP",
    )
)
NO_STORE = RESPONSES.add(
    Rule(
        "store",
        "needs a database: this router runs without --database",
        "Also previous_response_id and item_reference. Left out: stored where there is one.",
    )
)
STORED_CHAT = RESPONSES.add(
    Rule("store", "needs messages", "A prompt is no conversation. Also previous_response_id.", "gRPC")
)
STORED_ONE = RESPONSES.add(
    Rule("store", "is only for a request with one answer", "A conversation has one.", "gRPC")
)
STORED_WHOLE = RESPONSES.add(
    Rule("resume_after_tokens", "must be left out with store", "The answer would lack its begin.", "gRPC")
)
STORED_MESSAGE = RESPONSES.add(
    Rule("messages[i].name", "must be left out with store", "Items have none. Also partial.", "gRPC")
)
RESPONSE_ROWS = RESPONSES.add(
    Size(
        "top_logprobs",
        0,
        32 << 20,
        "bytes of log probabilities",
        "Four events of a stream repeat them.",
    )
)
STORED = RESPONSES.add(
    Size(
        "store",
        0,
        4 * bounds.MAX_BODY_BYTES,
        "bytes of JSON in a response that is stored",
        "A long answer with log probabilities. Without store=true or background it is left out.",
    )
)
REFERENCES = RESPONSES.add(
    Size("input", 0, 64, "earlier responses with items that are referred to", "Each is read.", "HTTP")
)
REFERRED = RESPONSES.add(
    Size(
        "input",
        0,
        64 << 20,
        "bytes of JSON in the stored responses that one body, or all jobs of one call, continue or refer to",
        "All of each is read, however little of it is referred to.",
    )
)
CONVERSATION = RESPONSES.add(
    Size(
        "previous_response_id",
        0,
        bounds.MAX_BODY_BYTES,
        "bytes in the conversation that goes on, and in the items that input refers to",
        "As if the body had them; of their structure, too.",
    )
)
BACKGROUND = RESPONSES.add(
    Rule(
        "background",
        "needs POST /v1/responses of a router with --database, and store that is not false",
        "A job runs it and keeps its answer.",
        "HTTP",
    )
)
BACKGROUND_CANCEL = RESPONSES.add(
    Rule("response_id", "must be of a response in the background", "Others end with their calls.")
)
BACKGROUND_DELETE = RESPONSES.add(
    Rule("response_id", "must be of a response that has ended: cancel it first", "It still runs.")
)
BACKGROUND_STREAM = RESPONSES.add(
    Rule("stream", "is only for responses in the background", "The events of others are not kept.", "HTTP")
)
BACKGROUND_PREVIOUS = RESPONSES.add(
    Rule(
        "previous_response_id",
        "names a response that is {status}: one that has an answer can be continued",
        "A response in the background may have none yet, or never.",
    )
)
STARTING_AFTER = RESPONSES.add(
    Range("starting_after", 0, 1 << 31, "The number of an event.", whole=True, apis="HTTP")
)
STARTING_AFTER_LAST = RESPONSES.add(
    Rule(
        "starting_after",
        "is beyond the last event of this response, which has number {last}",
        "The last one itself gives an empty stream. A response that runs is waited for.",
        "HTTP",
    )
)
STARTING_AFTER_STREAM = RESPONSES.add(
    Rule("starting_after", "needs stream=true", "A response in one piece has no events.", "HTTP")
)
PAGE_LIMIT = RESPONSES.add(Range("limit", 1, 100, "Input items of one page. gRPC: 0 = 20.", whole=True))
PAGE_ORDER = RESPONSES.add(Rule("order", "must be asc or desc", "As OpenAI's.", "HTTP"))

MESSAGES = Section("/v1/messages")
MESSAGES_ROLE = MESSAGES.add(
    Rule("messages[i].role", "must be user, assistant or system", "As Anthropic's.", "HTTP")
)
BLOCK = MESSAGES.add(
    Rule(
        "messages[i].content[j].type",
        "{kind} is not supported here: blocks are {allowed}",
        "The model reads text.",
        "HTTP",
    )
)
PREFILL = MESSAGES.add(
    Rule(
        "messages[i].content",
        "must be text without white space at its end where the answer continues it",
        "As Anthropic's: the last message may be the assistant's.",
        "HTTP",
    )
)
PREFILL_THINKING = MESSAGES.add(
    Rule(
        "thinking",
        "must be disabled where the answer continues the last message",
        "As Anthropic's: thinking comes before a text.",
        "HTTP",
    )
)
MAX_TOKENS = MESSAGES.add(Rule("max_tokens", "must be given", "As Anthropic's.", "HTTP"))
THINKING = MESSAGES.add(
    Rule(
        "thinking.type",
        "must be enabled, adaptive or disabled",
        "Left out: disabled. `budget_tokens` bounds nothing.",
        "HTTP",
    )
)
BUDGET = MESSAGES.add(
    Rule(
        "thinking.budget_tokens", "must be a whole number from 1024 to max_tokens", "As Anthropic's.", "HTTP"
    )
)
SERVER_TOOL = MESSAGES.add(
    Rule(
        "tools[i].type",
        "{kind} is not served here: the client runs tools of type custom",
        "Server tools do not run here.",
        "HTTP",
    )
)
MESSAGES_CHOICE = MESSAGES.add(
    Rule("tool_choice.type", "must be auto, any, tool or none", "As Anthropic's.", "HTTP")
)
OUTPUT_FORMAT = MESSAGES.add(
    Rule("output_config.format.type", "must be json_schema", "As Anthropic's.", "HTTP")
)
OUTPUT_EFFORT = MESSAGES.add(
    Rule("output_config.effort", "must be one of low, medium, high, xhigh, max", "As Anthropic's.", "HTTP")
)
EDITS = MESSAGES.add(
    Rule(
        "context_management.edits[i].type",
        "{kind} is not supported here: the client edits its history",
        "clear_thinking_20251015 is taken: the template keeps the thinking of a tool loop.",
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
        "the oldest are deleted, at one of 16 saves",
    ),
    ("Life of a stored response", f"{RESPONSE_TTL_S:g} s", "deleted"),
    (
        "Reads and writes of one tenant's stored responses at one router",
        f"{MAX_TENANT_RESPONSE_CALLS}",
        f"others of the tenant wait {RESPONSE_CALL_WAIT_S:g} s; then 429, and an answer goes unstored",
    ),
    (
        "Stored responses that are read together to continue them or refer to them: all tenants",
        f"{MAX_CONVERSATIONS_READ}",
        f"others wait {RESPONSE_CALL_WAIT_S:g} s; then 429",
    ),
    (
        "Earlier items of one tenant's jobs that are checked at a time",
        f"{MAX_TENANT_CHECKED_BYTES} bytes of JSON",
        "429",
    ),
    (
        "Whole answers, stored responses, files, lists and usage that one tenant's clients are being sent"
        " at one router",
        f"{MAX_TENANT_SENT_RESPONSE_BYTES} bytes; those of 64 KiB or less do not count, of a file 1 MiB",
        "429, RESOURCE_EXHAUSTED",
    ),
)
