"""Stored responses and their items as messages of ResponseService. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.router.api.json_body import Json
from services.router.api.openai.echoed_forms import is_json_result, json_text
from services.router.api.openai.messages import arguments_text
from services.router.api.responses.errors import ResponseErrorCode
from services.router.api.responses.items import kind_of
from services.router.api.responses.stored.items import PAGE_ITEMS, page_of, read_response
from slipstream.enum_names import MESSAGE_ROLES
from slipstream.metering.money import pico_of
from slipstream.v1 import responses_pb2, router_pb2

_ERROR_CODES: Mapping[str, responses_pb2.ResponseErrorCode.ValueType] = {
    code: responses_pb2.ResponseErrorCode.Value(f"RESPONSE_ERROR_CODE_{code.name}")
    for code in ResponseErrorCode
}


def response_message(found: Json | bytes) -> responses_pb2.Response:
    """A response, which is JSON where it is stored."""
    response = read_response(found) if isinstance(found, bytes) else found
    error = response.get("error") or {}
    message = responses_pb2.Response(
        id=response["id"],
        status=responses_pb2.ResponseStatus.Value(f"RESPONSE_STATUS_{response['status'].upper()}"),
        model=response["model"],
        previous_response_id=response.get("previous_response_id") or "",
        instructions=response.get("instructions") or "",
        output=[item_message(item) for item in response["output"]],
        metadata=response.get("metadata") or {},
        created_unix_s=response["created_at"],
        error_code=_error_code(error),
        error=error.get("message") or "",
    )
    if usage := response.get("usage"):
        message.usage.CopyFrom(_usage(usage))
    return message


def encoded_response(found: Json | bytes) -> bytes:
    """A GetResponseResponse, and a CancelResponseResponse, which is the same on the wire."""
    return responses_pb2.GetResponseResponse(response=response_message(found)).SerializeToString()


def items_page(items: Sequence[Json], request: responses_pb2.ListInputItemsRequest) -> bytes:
    """The ListInputItemsResponse of a page. Raises InvalidArgument, and NotFound for an unknown `after`."""
    page = page_of(
        items,
        after=request.after or None,
        order="asc" if request.oldest_first else "desc",
        limit=request.limit or PAGE_ITEMS,
    )
    listed = [item_message(item) for item in page["data"]]
    return responses_pb2.ListInputItemsResponse(items=listed, has_more=page["has_more"]).SerializeToString()


def item_message(item: Json) -> responses_pb2.ResponseItem:
    """An item of an input or of an output."""
    message = responses_pb2.ResponseItem(id=_string(item.get("id")))
    match kind_of(item):
        case "reasoning":
            message.reasoning = _text(item.get("content") or item.get("summary"))
        case "function_call":
            call = message.tool_call
            call.id, call.name = _string(item.get("call_id")), _string(item.get("name"))
            call.arguments = arguments_text(item.get("arguments"))
        case "function_call_output":
            message.tool_result.tool_call_id = _string(item.get("call_id"))
            output = item.get("output")
            message.tool_result.output = json_text(output) if is_json_result(output) else _text(output)
        case _:
            message.message.role = MESSAGE_ROLES.values.get(
                item.get("role", ""), router_pb2.MESSAGE_ROLE_UNSPECIFIED
            )
            message.message.content.add(text=_text(item.get("content")))
    return message


def _error_code(error: Json) -> responses_pb2.ResponseErrorCode.ValueType:
    """The code of a response's error, which is empty where nothing failed."""
    if not error:
        return responses_pb2.RESPONSE_ERROR_CODE_UNSPECIFIED
    return _ERROR_CODES.get(error.get("code", ""), responses_pb2.RESPONSE_ERROR_CODE_SERVER_ERROR)


def _text(content: Any) -> str:
    """A text, or parts of text as one."""
    if isinstance(content, list):
        return "".join(
            [_string(part.get("refusal" if part.get("type") == "refusal" else "text")) for part in content]
        )
    return _string(content)


def _string(value: Any) -> str:
    """A text of an item; other values that a client sent there were not read, and are none."""
    return value if isinstance(value, str) else ""


def _usage(usage: Json) -> router_pb2.Usage:
    found = router_pb2.Usage(
        prompt_tokens=usage["input_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        completion_tokens=usage["output_tokens"],
        reasoning_tokens=usage["output_tokens_details"]["reasoning_tokens"],
    )
    if "cost" in usage:
        found.cost.amount_pico, found.cost.currency = pico_of(usage["cost"]), usage["currency"]
    return found
