"""The demo's conversation: the customer's messages, and the shop behind the agent's tools.

The shipped model was trained on the tools of `models/helpdesk/tools.py`; order numbers, dates and names here
occur in the demo alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.helpdesk.tools import TOOLS_BY_NAME

SYSTEM_PROMPT = (
    "You answer the customers of Blue Harbor. Be warm and polite. The warranty lasts 12 months. "
    "Returns are possible within 30 days. The store is in Lisbon."
)
TOOLS = [
    TOOLS_BY_NAME[name].schema()
    for name in ("get_order_status", "refund_order", "get_invoice", "reset_password")
]


@dataclass(frozen=True, slots=True)
class CustomerTurn:
    """One customer message. `tool`: the function that the agent must call; `states`: values in its answer."""

    user: str
    tool: str | None
    arguments: Mapping[str, Any]
    states: tuple[str, ...]
    note: str = ""


TURNS = (
    CustomerTurn(
        "Where is my order 482135?",
        "get_order_status",
        {"order_id": "482135"},
        ("482135", "2026-12-04"),
    ),
    CustomerTurn(
        "Please refund 25.75 euros for order 482135.",
        "refund_order",
        {"order_id": "482135", "amount": 25.75},
        ("25.75", "R-70931"),
    ),
    CustomerTurn(
        "Can you look up invoice INV-30562?",
        "get_invoice",
        {"invoice_id": "INV-30562"},
        ("INV-30562", "129.95", "paid"),
        note="on the other prefill worker",
    ),
    CustomerTurn(
        "I forgot my password. My e-mail is anna.keller@mail.example.",
        "reset_password",
        {"email": "anna.keller@mail.example"},
        ("anna.keller@mail.example", "30"),
        note="decode-0 killed; decode-1 asks the drafter service for drafts",
    ),
    CustomerTurn(
        "How long is the warranty?", None, {}, ("12 months",), note="with the drafter service killed"
    ),
)


def run_tool(name: str, arguments: Mapping[str, Any]) -> str:
    """The response of the shop's system as JSON text; an error that the agent reads for an unknown order."""
    if name == "get_order_status" and arguments.get("order_id") == "482135":
        return json.dumps({"status": "shipped", "eta": "2026-12-04", "carrier": "DHL"})
    if name == "refund_order":
        return json.dumps({"refund_id": "R-70931", "status": "approved", "days": 5})
    if name == "get_invoice":
        return json.dumps({"amount": 129.95, "status": "paid", "due": "2026-12-20"})
    if name == "reset_password":
        return json.dumps({"valid_minutes": 30})
    return json.dumps({"error": "not found"})
