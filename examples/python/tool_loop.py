"""A Python function as a tool: the model calls it until it can answer.

python examples/python/tool_loop.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys
from typing import Annotated

from slipstream import Client, SlipstreamError, ToolError

ORDERS = {"482135": {"status": "shipped", "eta": "2026-12-04", "carrier": "DHL"}}


def get_order_status(order_id: Annotated[str, "six digits"]) -> dict[str, str]:
    """Look up the status of an order."""
    if order_id not in ORDERS:
        raise ToolError("not found")  # the model reads this; other exceptions end the loop
    return ORDERS[order_id]


def main(endpoint: str) -> None:
    """Ask one question."""
    messages = [
        {"role": "system", "content": "You answer the customers of Blue Harbor. Be warm and polite."},
        {"role": "user", "content": "Where is my order 482135?"},
    ]
    with Client(endpoint) as client:
        run = client.run_tools(messages, [get_order_status], temperature=0.0, max_tokens=100)
    print(run.reply.text)
    # The next question follows these messages, so that the model remembers the result.
    print(len(run.messages), "messages")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
