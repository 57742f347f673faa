"""The types of errors, as the description of the API shows them; Workers AI's are in its envelope. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, forbid_unknown_fields=True):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["error"]
    error: MessagesErrorDetail
