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
BODY = _request.add(Size("body", 0, MAX_BODY_BYTES, "bytes", "256k tokens are about 1 MiB of text."))
BODY_STRUCTURE = _request.add(
    Rule(
        "body",
        f"must have at most {MAX_STRUCTURE_BYTES} bytes outside of texts and white space",
        "Each value becomes an object. Also for the arguments of all tool calls (their field).",
    )
)
BODY_DEPTH = _request.add(
    Rule(
        "body",
        f"may nest at most {MAX_JSON_DEPTH} lists and objects",
        "Parsers and checks recurse as deep as the body nests.",
    )
)
NUMBERS = _request.add(
    Rule(
        "prompt",
        f"must have at most {MAX_MESSAGE_NUMBERS} token ids",
        "Also stop_token_ids, and token_ids of Detokenize: all of a message, before it is parsed.",
        "gRPC",
    )
)
BODY_FORMAT = _request.add(
    Rule(
        "body",
        "must be one well-formed request: a JSON object on HTTP, a GenerateRequest on gRPC",
        "The router guesses nothing from a broken body.",
    )
)
BODY_JSON = _request.add(
    Rule("body", "is not JSON: {reason} at {at}", "A client's defect is found at its place.", "HTTP")
)
UTF8 = _request.add(Rule("any text", "must be valid UTF-8", "The tokenizer encodes valid text only."))
BODY_TIME = _request.add(
    Rule("body", f"must arrive within {BODY_READ_S:g} s", "Half-open connections hold no memory.", "HTTP")
)
UNKNOWN_FIELD = _request.add(
    Rule("any field", "is not a known field", "Of Generate. HTTP names it in the answer.", apis="gRPC")
)
UNSUPPORTED = _request.add(
    Rule("any field", "is not supported", "It would change the answer. On gRPC: echo of a chat.")
)
TYPE = _request.add(
    Rule("any field", "must be {expected}", "On gRPC the schema of the message has the types.", "HTTP")
)
MODEL = _request.add(
    Rule("model", "{model} is not served here; served: {served}", "Empty means the served model.")
)
INPUT = _request.add(Rule("messages", "must be given", "There is nothing to generate from."))
REQUEST_ID = _request.add(
    Rule("request_id", "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", "Headers and metadata carry it.")
)
REQUEST_ID_IN_USE = _request.add(
    Rule("request_id", "is in use by a running request", "An id names one running request of a tenant.")
)
SESSION = _request.add(
    Rule(
        "x-session-affinity",
        "must be 1 to 256 bytes of UTF-8 without control characters",
        "It becomes a key in etcd. Over gRPC, x-session-affinity-bin takes what is not ASCII.",
    )
)
TIMEOUT = _request.add(
    Range(
        "x-request-timeout-ms",
        1,
        3_600_000,
        f"Left out: {DEFAULT_DEADLINE_S / 60:g} minutes, on gRPC too, which has the call's deadline.",
        whole=True,
        apis="HTTP",
    )
)
PINNING = _request.add(
    Rule(
        "x-slipstream-prefill",
        "is not allowed: this router runs without --allow-requested-prefill",
        "Without the flag the router alone chooses the worker.",
    )
)
REQUESTED_WORKER = _request.add(
    Rule("x-slipstream-prefill", "{instance} is no ready prefill worker", "It is for demos and tests.")
)
PRIORITY = _request.add(
    Rule(
        "priority",
        "must be one of interactive, default, bulk",
        "The classes of admission; also x-slipstream-priority. OpenAI's service_tier maps to them.",
    )
)
METADATA = _request.add(Size("metadata", 0, 16, "entries", "As OpenAI's."))
METADATA_KEY = _request.add(Size("metadata.KEY", 1, 64, "characters in the key", "As OpenAI's."))
METADATA_VALUE = _request.add(Size("metadata.KEY", 0, 512, "characters", "As OpenAI's."))
RESUME = _request.add(
    Range("resume_after_tokens", 0, 1 << 20, "No output is longer.", whole=True, apis="gRPC")
)
RESUME_ONE = _request.add(
    Rule("resume_after_tokens", "is only for a request with one answer", "A token offset names one.", "gRPC")
)
SERVICE_TIER = _request.add(
    Rule(
        "service_tier",
        "must be one of auto, default, flex, priority, scale",
        "Each has a class of admission.",
        "HTTP",
    )
)
N = _request.add(Range("n", 1, 128, "As OpenAI's.", whole=True))
CHOICES = _request.add(
    Size("n", 1, 128, "choices for all prompts together", "Each is a request.", apis="HTTP")
)
REASONING_EFFORT = _request.add(
    Rule(
        "reasoning_effort",
        "must be one of none, minimal, low, medium, high, xhigh, max, default, auto",
        "All but none let the model reason; default and auto leave it to the model.",
        "HTTP",
    )
)
THINKING = _request.add(
    Rule(
        "thinking",
        "must be an object with type enabled, disabled, adaptive or auto, and keep all or null",
        "As Moonshot's API; adaptive is enabled, and auto leaves it to the model.",
        "HTTP",
    )
)
RESPONSE_FORMAT = _request.add(
    Rule(
        "response_format.type",
        "must be text, json_object or json_schema",
        "OpenAI's; vLLM's guided_* and structured_outputs have other forms.",
        "HTTP",
    )
)
OUTPUT_ONCE = _request.add(
    Rule(
        "response_format",
        "is given beside {other}",
        "Also guided_* and structured_outputs: an answer has one form.",
        "HTTP",
    )
)
OUTPUT_NAMED = _request.add(
    Rule(
        "structured_outputs",
        "must name a form: json, regex, choice, grammar or json_object",
        "A form by another name would hold nothing.",
        "HTTP",
    )
)
OUTPUT_TEXT = _request.add(
    Size("guided_regex", 1, MAX_GRAMMAR_BYTES, "bytes", "Also grammars and all choices; see OUTPUT_SCHEMA.")
)
OUTPUT_CHOICES = _request.add(Size("guided_choice", 1, 4096, "choices", "Texts, one of which is the answer."))
OUTPUT_SCHEMA_BYTES = _request.add(
    Size("response_format.json_schema.schema", 0, MAX_GRAMMAR_BYTES, "bytes", "Compiling takes time.")
)
OUTPUT_SCHEMA_DEPTH = _request.add(
    Rule(
        "response_format.json_schema.schema",
        f"is nested deeper than {MAX_OUTPUT_DEPTH} levels",
        "Compiling a schema recurses.",
    )
)
OUTPUT_SCHEMA = _request.add(
    Rule(
        "response_format.json_schema.schema",
        "must be a JSON Schema: an object, true or false",
        "Also guided_json and structured_outputs.json, which may be text.",
    )
)

_messages = Section("Messages and prompt")
MESSAGES = _messages.add(Size("messages", 1, 4096, "messages", "A conversation has at least one message."))
ROLE = _messages.add(
    Rule(
        "messages[i].role",
        "must be one of system, developer, user, assistant, tool",
        "The roles of the chat template.",
    )
)
CONTENT_PARTS = _messages.add(
    Size("messages[i].content", 0, 4096, "parts", "The router joins the parts to one text.")
)
NAME = _messages.add(
    Size("messages[i].name", 1, 128, "bytes", "Part of the message header. Of a result: the tool's.")
)
ASSISTANT_ONLY = _messages.add(
    Rule("messages[i].tool_calls", "is only for role assistant", "Also reasoning_content.")
)
PARTIAL = _messages.add(
    Rule("messages[i].partial", "is only for a last message of role assistant", "The answer continues it.")
)
PARTIAL_CALLS = _messages.add(
    Rule("messages[i].tool_calls", "must be left out of a partial message", "Only a text is continued.")
)
PARTIAL_TOOL_CHOICE = _messages.add(
    Rule("tool_choice", "must be auto or none with a partial message", "A forced call begins the answer.")
)
PARTIAL_OUTPUT = _messages.add(
    Rule(
        "response_format",
        "is not supported together with a partial message",
        "Also guided_* and structured_outputs: a form holds a whole answer.",
    )
)
GENERATION_PROMPT = _messages.add(
    Rule(
        "add_generation_prompt",
        "must be false when the last message is continued, and true otherwise",
        "The prompt ends either way.",
        "HTTP",
    )
)
TOOL_ONLY = _messages.add(
    Rule("messages[i].tool_call_id", "is only for role tool", "Only tool results answer a call.")
)
TOOL_CALL_ID = _messages.add(
    Size("messages[i].tool_call_id", 1, 256, "bytes", "Also tool_calls[j].id: results name their call.")
)
TOOL_RESULT = _messages.add(
    Rule(
        "messages[i].tool_call_id",
        "answers no tool call of an earlier assistant message",
        "The model would see a result without a call.",
    )
)
TOOL_CALLS = _messages.add(Size("messages[i].tool_calls", 0, 128, "calls", "The calls of one answer."))
TOOL_CALLS_TOGETHER = _messages.add(
    Size("messages", 0, 4096, "tool calls in all messages", "Each call is answered by a message.")
)
TOOL_CALL_NAME = _messages.add(
    Size("messages[i].tool_calls[j].function.name", 0, 256, "bytes", "Whatever a model wrote as a name.")
)
PROMPT = _messages.add(Size("prompt", 1, MAX_BODY_BYTES, "bytes", "A plain completion continues a text."))
PROMPTS = _messages.add(Size("prompt", 1, 128, "prompts", "Each has its own answers.", apis="HTTP"))
PROMPT_IDS = _messages.add(Rule("prompt", "must hold token ids from 0 to {last}", "The model's vocabulary."))
PROMPT_EMPTY = _messages.add(Rule("prompt", "must hold at least one token id", "As one text.", "gRPC"))

_tools = Section("Tools")
TOOLS = _tools.add(
    Rule("tools", f"at most {MAX_TOOLS} tools are allowed, not {{count}}", "Part of the prompt.")
)
TOOL_BYTES = _tools.add(
    Rule(
        "tools[i]",
        f"has {{count}} bytes, at most {MAX_TOOL_BYTES} are allowed",
        "They are part of the prompt.",
    )
)
TOOLS_BYTES = _tools.add(
    Size("tools", 0, 1 << 20, "bytes in all tools together", "256k tokens are about 1 MiB of text.")
)
TOOL_VALUES = _tools.add(
    Size("tools", 0, 32768, "JSON values in all tools together", "Rendering takes microseconds for each.")
)
TOOL_DEPTH = _tools.add(
    Rule("tools[i]", f"is nested deeper than {MAX_SCHEMA_DEPTH} levels", "Rendering a schema recurses.")
)
TOOL_NAME = _tools.add(
    Rule("tools[i].function.name", "must match [a-zA-Z0-9_-]{1,128}", "As Anthropic's; Kimi's format has it.")
)
TOOL_TWICE = _tools.add(
    Rule("tools[i].function.name", "{name!r} is declared twice", "A call must name one tool.")
)
TOOL_JSON = _tools.add(
    Rule("tools[i].function.parameters", "must be a JSON Schema", "Of any draft: text for the model.")
)
TOOL_CHOICE = _tools.add(
    Rule(
        "tool_choice",
        "must be none, auto, required, a function or allowed_tools",
        "Custom tools are not supported.",
    )
)
TOOL_CHOICE_FUNCTION = _tools.add(
    Rule("tool_choice.function.name", "{name} is not declared in tools", "It cannot be called.")
)
TOOL_STRICT = _tools.add(
    Rule(
        "tools[i].function.strict",
        "must be true or false",
        "With true the arguments of a call are valid under parameters.",
        "HTTP",
    )
)
TOOL_CHOICE_TOOLS = _tools.add(
    Rule("tool_choice", "needs tools", "required and a function choose among tools.")
)

_sampling = Section("Sampling")
for _row in SAMPLING_RANGES.values():
    _sampling.add(_row)
LOGIT_BIAS = _sampling.add(Size("logit_bias", 0, 1000, "entries", "Each is applied at each step."))
LOGIT_BIAS_VALUE = _sampling.add(Range("logit_bias.ID", -100, 100, "As OpenAI's."))
LOGIT_BIAS_TOKEN = _sampling.add(
    Rule("logit_bias.ID", "must be a token id from 0 to {last}", "The model's vocabulary.")
)
SEED = _sampling.add(
    Range("seed", -(1 << 63), (1 << 63) - 1, "An int64; gRPC carries no other.", whole=True, apis="HTTP")
)
TOP_LOGPROBS = _sampling.add(Range("top_logprobs", 0, 20, "As OpenAI's.", whole=True))
TOP_LOGPROBS_OFF = _sampling.add(
    Rule("top_logprobs", "needs logprobs to be true", "As OpenAI's; gRPC has one field.", "HTTP")
)
PROMPT_LOGPROBS = _sampling.add(Range("prompt_logprobs", 0, 20, "As vLLM's; of `echo`, too.", whole=True))
PROMPT_ROWS = _sampling.add(
    Size("prompt_logprobs", 0, 1 << 17, "log probabilities of prompts", "All rows of the answer, 1 + N each.")
)
ANSWER_ROWS = _sampling.add(
    Size("logprobs", 0, 64 << 20, "bytes of log probabilities", "Of a whole answer.", "HTTP")
)
STOP = _sampling.add(Size("stop", 0, 16, "stop strings", "Each is looked for in each piece of text."))
STOP_STRING = _sampling.add(Size("stop[i]", 1, 256, "bytes", "Text that may become one is held back."))
MIN_TOKENS = _sampling.add(
    Rule(
        "min_tokens",
        "must be a whole number from 0 to max_tokens, not {value}",
        "No stop token ends the answer before it has so many tokens.",
    )
)
STOP_TOKENS = _sampling.add(Size("stop_token_ids", 0, 64, "token ids", "Workers look for each at each step."))
STOP_TOKEN = _sampling.add(
    Rule("stop_token_ids[i]", "must be a token id from 0 to {last}", "The model's vocabulary.")
)
MAX_TOKENS = _sampling.add(
    Rule("max_tokens", "must be at least 1, not {value}", "Of a chat; the answer to a prompt may be empty.")
)
# Libraries look for the first sentence (litellm), or for "prompt is too long" (langchain-openai, clients of
# Anthropic's API), to know that a conversation has to become shorter.
_OVERFLOW = "This model's maximum context length is {max_context_tokens} tokens. However, you requested "
PROMPT_TOKENS = _sampling.add(
    Overflow(
        "messages",
        _OVERFLOW
        + "{prompt_tokens} tokens in the prompt, which leaves no room for an answer: the prompt is too long.",
        "At least one token must fit behind the prompt (field prompt for plain completions).",
    )
)
COMPLETION = _sampling.add(
    Overflow("max_tokens", _OVERFLOW + "{value} tokens in the completion.", "No prompt leaves so much room.")
)
CONTEXT = _sampling.add(
    Overflow(
        "max_tokens",
        _OVERFLOW + "{total} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion).",
        "Left out, max_tokens is the rest of the context.",
    )
)

_usage = Section("Usage")
USAGE_DAY = _usage.add(Rule("from", "must be a day as 2027-01-31", "Of UTC; also `to`."))
USAGE_DAYS = _usage.add(Rule("from", "must not be after `to`", "Both days count."))
USAGE_GROUP = _usage.add(
    Rule("group_by", "must be names of day, tenant, key, model, endpoint, each once", "They are columns.")
)

SECTIONS = (_request, _messages, _tools, _sampling, _usage)
BOUNDS: dict[str, Bound] = {
    **{name.upper(): row for name, row in SAMPLING_RANGES.items()},
    **{name: row for name, row in list(globals().items()) if name.isupper() and isinstance(row, Bound)},
}


def body_too_large() -> BodyTooLarge:
    """The error for a body beyond MAX_BODY_BYTES; the router does not read the rest."""
    return BodyTooLarge(BODY.field, BODY.words)
