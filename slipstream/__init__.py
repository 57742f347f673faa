"""Slipstream: a cluster that serves Kimi-K2.5-class models.

    from slipstream import Client, AsyncClient

`slipstream.client` shows their use, `slipstream.requests` the arguments, `slipstream.errors` the errors.
All names below load on first use, so that services which only need `slipstream.v1` stay light. This package
is what clients install. Must not import `libs`, `services` or `supervisor`.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.async_client import AsyncClient, AsyncStream
    from slipstream.batches.messages import BatchAnswer, BatchFault, BatchFile, BatchProgress, SubmittedBatch
    from slipstream.client import Client, Stream
    from slipstream.errors import (
        Aborted,
        AnswerMismatch,
        BodyTooLarge,
        ContextExceeded,
        DataCorrupt,
        DeadlineExceeded,
        Draining,
        FailedPrecondition,
        Internal,
        InvalidArgument,
        NotFound,
        Overloaded,
        PermissionDenied,
        Quarantined,
        QuotaExceeded,
        RateLimited,
        SlipstreamError,
        Unauthenticated,
        Unavailable,
    )
    from slipstream.jobs.messages import FinishedJob, GroupProgress, JobOptions, SubmittedJob
    from slipstream.metering.usage import UsageRecord
    from slipstream.replies import (
        Event,
        Logprob,
        ModelPricing,
        PromptTokens,
        Reply,
        RequestStats,
        ServedModel,
        ToolCall,
        Usage,
    )
    from slipstream.requests import ChatArguments, GenerateArguments, Message, Tool
    from slipstream.responses.messages import ConversationItem, SavedResponse
    from slipstream.rpc.tls import TlsFiles
    from slipstream.tool_loop import ToolRun
    from slipstream.typed.function_tool import ToolError

__all__ = [
    "Aborted",
    "AnswerMismatch",
    "AsyncClient",
    "AsyncStream",
    "BatchAnswer",
    "BatchFault",
    "BatchFile",
    "BatchProgress",
    "BodyTooLarge",
    "ChatArguments",
    "Client",
    "ContextExceeded",
    "ConversationItem",
    "DataCorrupt",
    "DeadlineExceeded",
    "Draining",
    "Event",
    "FailedPrecondition",
    "FinishedJob",
    "GenerateArguments",
    "GroupProgress",
    "Internal",
    "InvalidArgument",
    "JobOptions",
    "Logprob",
    "Message",
    "ModelPricing",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PromptTokens",
    "Quarantined",
    "QuotaExceeded",
    "RateLimited",
    "Reply",
    "RequestStats",
    "SavedResponse",
    "ServedModel",
    "SlipstreamError",
    "Stream",
    "SubmittedBatch",
    "SubmittedJob",
    "TlsFiles",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolRun",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "UsageRecord",
    "__version__",
]
__version__ = "0.1.0"

# gRPC documents this as its default, and yet prints a line where a router closes an idle connection. It reads
# this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_HOMES = {
    "async_client": ("AsyncClient", "AsyncStream"),
    "batches.messages": ("BatchAnswer", "BatchFault", "BatchFile", "BatchProgress", "SubmittedBatch"),
    "client": ("Client", "Stream"),
    "jobs.messages": ("FinishedJob", "GroupProgress", "JobOptions", "SubmittedJob"),
    "metering.usage": ("UsageRecord",),
    "replies": (
        "Event",
        "Logprob",
        "ModelPricing",
        "PromptTokens",
        "Reply",
        "RequestStats",
        "ServedModel",
        "ToolCall",
        "Usage",
    ),
    "requests": ("ChatArguments", "GenerateArguments", "Message", "Tool"),
    "responses.messages": ("ConversationItem", "SavedResponse"),
    "rpc.tls": ("TlsFiles",),
    "typed.function_tool": ("ToolError",),
    "tool_loop": ("ToolRun",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_HOME.get(name, 'errors')}"), name)
