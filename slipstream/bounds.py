"""The one table of input bounds: what a request may hold, and the message of each refusal.

Both APIs of the router check with these rows (where: services/router/request/validation.py) and refuse in the
same words. docs/bounds.md is made from the table (`python -m libs.common.service_bounds > docs/bounds.md`); a
test holds the two together. Each row has a test that refuses a bad value on each of its APIs. Pure.
"""

from __future__ import annotations

from slipstream.bound import Bound, Overflow, Range, Rule, Section, Size
from slipstream.errors import BodyTooLarge
from slipstream.sampling import SAMPLING_RANGES

MAX_BODY_BYTES = 8 << 20
BODY_READ_S = 30.0
DEFAULT_DEADLINE_S = 1800.0
MAX_TOOLS = 128
MAX_TOOL_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_GRAMMAR_BYTES = 512 << 10
MAX_OUTPUT_DEPTH = 128
# What a parser does per byte outside of texts takes a hundred times as long as per byte of a text.
MAX_STRUCTURE_BYTES = 256 << 10
MAX_MESSAGE_NUMBERS = 1 << 19  # two contexts of Kimi-K2.5; the parser takes 8 ms, with the interpreter's lock
MAX_JSON_DEPTH = 512  # Python's parsers, encoders and repr end at about 990, each at another depth
MAX_KEY_FILE_BYTES = 4 << 20
MAX_SECRET_FILE_BYTES = 1 << 20
# A limit of an API key in requests or tokens, and one in the currency of the prices.
MAX_LIMIT = 10**12
MAX_SPEND = 10**6

_request = Section("The request")
BODY = _request.add(Size("body", 0, MAX_BODY_BYTES, "bytes"))
BODY_STRUCTURE = _request.add(
    Rule(
        "body",
        f"must have at most {MAX_STRUCTURE_BYTES} bytes outside of texts and white space",
        "Also the arguments of all tool calls.",
    )
)
BODY_DEPTH = _request.add(Rule("body", f"may nest at most {MAX_JSON_DEPTH} lists and objects"))
NUMBERS = _request.add(
    Rule(
        "prompt",
        f"must have at most {MAX_MESSAGE_NUMBERS} token ids",
        "Also stop_token_ids and Detokenize's token_ids.",
        "gRPC",
    )
)
BODY_FORMAT = _request.add(
    Rule("body", "must be one well-formed request: a JSON object on HTTP, a GenerateRequest on gRPC")
)
BODY_JSON = _request.add(Rule("body", "is not JSON: {reason} at {at}", apis="HTTP"))
UTF8 = _request.add(Rule("any text", "must be valid UTF-8"))
BODY_TIME = _request.add(Rule("body", f"must arrive within {BODY_READ_S:g} s", apis="HTTP"))
UNKNOWN_FIELD = _request.add(
    Rule("any field", "is not a known field", "HTTP names it in the answer.", apis="gRPC")
)
UNSUPPORTED = _request.add(
    Rule("any field", "is not supported", "Only fields that would change the answer. gRPC: echo of a chat.")
)
TYPE = _request.add(Rule("any field", "must be {expected}", apis="HTTP"))
MODEL = _request.add(
    Rule("model", "{model} is not served here; served: {served}", "Empty: the served model.")
)
INPUT = _request.add(Rule("messages", "must be given"))
REQUEST_ID = _request.add(Rule("request_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"))
REQUEST_ID_IN_USE = _request.add(Rule("request_id", "is in use by a running request", "Ids are per tenant."))
SESSION = _request.add(
    Rule(
        "x-session-affinity",
        "must be 1 to 256 bytes of UTF-8 without control characters",
        "gRPC: x-session-affinity-bin takes non-ASCII.",
    )
)
TIMEOUT = _request.add(
    Range(
        "x-request-timeout-ms",
        1,
        3_600_000,
        f"Default: {DEFAULT_DEADLINE_S / 60:g} minutes, also for a gRPC call without deadline.",
        whole=True,
        apis="HTTP",
    )
)
PINNING = _request.add(
    Rule("x-slipstream-prefill", "is not allowed: this router runs without --allow-requested-prefill")
)
REQUESTED_WORKER = _request.add(Rule("x-slipstream-prefill", "{instance} is no ready prefill worker"))
PRIORITY = _request.add(
    Rule(
        "priority",
        "must be one of interactive, default, bulk",
        "Also x-slipstream-priority; service_tier maps to these.",
    )
)
METADATA = _request.add(Size("metadata", 0, 16, "entries"))
METADATA_KEY = _request.add(Size("metadata.KEY", 1, 64, "characters in the key"))
METADATA_VALUE = _request.add(Size("metadata.KEY", 0, 512, "characters"))
RESUME = _request.add(Range("resume_after_tokens", 0, 1 << 20, whole=True, apis="gRPC"))
RESUME_ONE = _request.add(Rule("resume_after_tokens", "is only for a request with one answer", apis="gRPC"))
SERVICE_TIER = _request.add(
    Rule("service_tier", "must be one of auto, default, flex, priority, scale", apis="HTTP")
)
N = _request.add(Range("n", 1, 128, whole=True))
CHOICES = _request.add(Size("n", 1, 128, "choices for all prompts together", apis="HTTP"))
REASONING_EFFORT = _request.add(
    Rule(
        "reasoning_effort",
        "must be one of none, minimal, low, medium, high, xhigh, max, default, auto",
        "none: no reasoning; default, auto: the model's choice.",
        "HTTP",
    )
)
THINKING = _request.add(
    Rule(
        "thinking",
        "must be an object with type enabled, disabled, adaptive or auto, and keep all or null",
        "adaptive = enabled; auto: the model's choice.",
        "HTTP",
    )
)
RESPONSE_FORMAT = _request.add(
    Rule("response_format.type", "must be text, json_object or json_schema", apis="HTTP")
)
OUTPUT_ONCE = _request.add(
    Rule("response_format", "is given beside {other}", "Also `guided_*`, `structured_outputs`.", "HTTP")
)
OUTPUT_NAMED = _request.add(
    Rule("structured_outputs", "must name a form: json, regex, choice, grammar or json_object", apis="HTTP")
)
OUTPUT_TEXT = _request.add(
    Size("guided_regex", 1, MAX_GRAMMAR_BYTES, "bytes", "Also grammars, and all choices together.")
)
OUTPUT_CHOICES = _request.add(
    Size("guided_choice", 1, 4096, "choices", "Long ones may be too complex before that.")
)
OUTPUT_SCHEMA_BYTES = _request.add(Size("response_format.json_schema.schema", 0, MAX_GRAMMAR_BYTES, "bytes"))
OUTPUT_SCHEMA_DEPTH = _request.add(
    Rule("response_format.json_schema.schema", f"is nested deeper than {MAX_OUTPUT_DEPTH} levels")
)
OUTPUT_SCHEMA = _request.add(
    Rule(
        "response_format.json_schema.schema",
        "must be a JSON Schema: an object, true or false",
        "Also guided_json and structured_outputs.json, as text too.",
    )
)

_messages = Section("Messages and prompt")
MESSAGES = _messages.add(Size("messages", 1, 4096, "messages"))
ROLE = _messages.add(Rule("messages[i].role", "must be one of system, developer, user, assistant, tool"))
CONTENT_PARTS = _messages.add(Size("messages[i].content", 0, 4096, "parts"))
NAME = _messages.add(Size("messages[i].name", 1, 128, "bytes", "Of a result: the tool's name."))
ASSISTANT_ONLY = _messages.add(
    Rule("messages[i].tool_calls", "is only for role assistant", "Also reasoning_content.")
)
PARTIAL = _messages.add(Rule("messages[i].partial", "is only for a last message of role assistant"))
PARTIAL_CALLS = _messages.add(Rule("messages[i].tool_calls", "must be left out of a partial message"))
PARTIAL_TOOL_CHOICE = _messages.add(Rule("tool_choice", "must be auto or none with a partial message"))
PARTIAL_OUTPUT = _messages.add(
    Rule(
        "response_format",
        "is not supported together with a partial message",
        "Also `guided_*`, `structured_outputs`.",
    )
)
GENERATION_PROMPT = _messages.add(
    Rule(
        "add_generation_prompt",
        "must be false when the last message is continued, and true otherwise",
        apis="HTTP",
    )
)
TOOL_ONLY = _messages.add(Rule("messages[i].tool_call_id", "is only for role tool"))
TOOL_CALL_ID = _messages.add(Size("messages[i].tool_call_id", 1, 256, "bytes", "Also tool_calls[j].id."))
TOOL_RESULT = _messages.add(
    Rule("messages[i].tool_call_id", "answers no tool call of an earlier assistant message")
)
TOOL_CALLS = _messages.add(Size("messages[i].tool_calls", 0, 128, "calls"))
TOOL_CALLS_TOGETHER = _messages.add(Size("messages", 0, 4096, "tool calls in all messages"))
TOOL_CALL_NAME = _messages.add(Size("messages[i].tool_calls[j].function.name", 0, 256, "bytes"))
PROMPT = _messages.add(Size("prompt", 1, MAX_BODY_BYTES, "bytes"))
PROMPTS = _messages.add(Size("prompt", 1, 128, "prompts", apis="HTTP"))
PROMPT_IDS = _messages.add(Rule("prompt", "must hold token ids from 0 to {last}"))
PROMPT_EMPTY = _messages.add(Rule("prompt", "must hold at least one token id", apis="gRPC"))

_tools = Section("Tools")
TOOLS = _tools.add(Rule("tools", f"at most {MAX_TOOLS} tools are allowed, not {{count}}"))
TOOL_BYTES = _tools.add(Rule("tools[i]", f"has {{count}} bytes, at most {MAX_TOOL_BYTES} are allowed"))
TOOLS_BYTES = _tools.add(Size("tools", 0, 1 << 20, "bytes in all tools together"))
TOOL_VALUES = _tools.add(Size("tools", 0, 32768, "JSON values in all tools together"))
TOOL_DEPTH = _tools.add(Rule("tools[i]", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels"))
TOOL_NAME = _tools.add(Rule("tools[i].function.name", "must match [a-zA-Z0-9_-]{1,128}"))
TOOL_TWICE = _tools.add(Rule("tools[i].function.name", "{name!r} is declared twice"))
TOOL_JSON = _tools.add(Rule("tools[i].function.parameters", "must be a JSON Schema", "Of any draft."))
TOOL_CHOICE = _tools.add(Rule("tool_choice", "must be none, auto, required, a function or allowed_tools"))
TOOL_CHOICE_FUNCTION = _tools.add(Rule("tool_choice.function.name", "{name} is not declared in tools"))
TOOL_STRICT = _tools.add(Rule("tools[i].function.strict", "must be true or false", apis="HTTP"))
TOOL_CHOICE_TOOLS = _tools.add(Rule("tool_choice", "needs tools", "If it is required or a function."))

_sampling = Section("Sampling")
for _row in SAMPLING_RANGES.values():
    _sampling.add(_row)
LOGIT_BIAS = _sampling.add(Size("logit_bias", 0, 1000, "entries"))
LOGIT_BIAS_VALUE = _sampling.add(Range("logit_bias.ID", -100, 100))
LOGIT_BIAS_TOKEN = _sampling.add(Rule("logit_bias.ID", "must be a token id from 0 to {last}"))
SEED = _sampling.add(Range("seed", -(1 << 63), (1 << 63) - 1, whole=True, apis="HTTP"))
TOP_LOGPROBS = _sampling.add(Range("top_logprobs", 0, 20, whole=True))
TOP_LOGPROBS_OFF = _sampling.add(Rule("top_logprobs", "needs logprobs to be true", apis="HTTP"))
PROMPT_LOGPROBS = _sampling.add(Range("prompt_logprobs", 0, 20, "Also with `echo`.", whole=True))
PROMPT_ROWS = _sampling.add(
    Size("prompt_logprobs", 0, 1 << 17, "log probabilities of prompts", "1 + N a token, of the whole answer.")
)
ANSWER_ROWS = _sampling.add(
    Size("logprobs", 0, 64 << 20, "bytes of log probabilities", "Of a whole answer.", "HTTP")
)
STOP = _sampling.add(Size("stop", 0, 16, "stop strings"))
STOP_STRING = _sampling.add(Size("stop[i]", 1, 256, "bytes", "HTTP ignores empty ones."))
MIN_TOKENS = _sampling.add(Rule("min_tokens", "must be a whole number from 0 to max_tokens, not {value}"))
STOP_TOKENS = _sampling.add(Size("stop_token_ids", 0, 64, "token ids"))
STOP_TOKEN = _sampling.add(Rule("stop_token_ids[i]", "must be a token id from 0 to {last}"))
MAX_TOKENS = _sampling.add(
    Rule("max_tokens", "must be at least 1, not {value}", "Of a chat; 0 is valid for a prompt.")
)
# Libraries look for the first sentence (litellm), or for "prompt is too long" (langchain-openai, clients of
# Anthropic's API), to know that a conversation has to become shorter.
_OVERFLOW = "This model's maximum context length is {max_context_tokens} tokens. However, you requested "
PROMPT_TOKENS = _sampling.add(
    Overflow(
        "messages",
        _OVERFLOW
        + "{prompt_tokens} tokens in the prompt, which leaves no room for an answer: the prompt is too long.",
        "Field prompt for plain completions.",
    )
)
COMPLETION = _sampling.add(Overflow("max_tokens", _OVERFLOW + "{value} tokens in the completion."))
CONTEXT = _sampling.add(
    Overflow(
        "max_tokens",
        _OVERFLOW + "{total} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion).",
        "Default: the rest of the context.",
    )
)

_usage = Section("Usage")
USAGE_DAY = _usage.add(Rule("from", "must be a day as 2027-01-31", "UTC; also `to`."))
USAGE_DAYS = _usage.add(Rule("from", "must not be after `to`", "Both days count."))
USAGE_GROUP = _usage.add(Rule("group_by", "must be names of day, tenant, key, model, endpoint, each once"))

SECTIONS = (_request, _messages, _tools, _sampling, _usage)
BOUNDS: dict[str, Bound] = {
    **{name.upper(): row for name, row in SAMPLING_RANGES.items()},
    **{name: row for name, row in list(globals().items()) if name.isupper() and isinstance(row, Bound)},
}


def body_too_large() -> BodyTooLarge:
    """The error for a body beyond MAX_BODY_BYTES; the router does not read the rest."""
    return BodyTooLarge(BODY.field, BODY.words)
