"""An answer as an instance of a dataclass; a pydantic model works the same.

python examples/python/typed_answer.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from slipstream import AnswerMismatch, Client, SlipstreamError


@dataclass
class Ticket:
    """What the help desk files. The cluster holds the answer to these types, token by token."""

    subject: Literal["order", "refund", "warranty"]
    urgent: bool


def main(endpoint: str) -> None:
    """File one message."""
    messages = [{"role": "user", "content": "Where is my order 482135?"}]
    with Client(endpoint) as client:
        try:
            ticket = client.chat(messages, response_format=Ticket, temperature=0.0, max_tokens=400)
        except AnswerMismatch as error:  # such as an answer that ended at max_tokens
            sys.exit(error.message)
    print(f"{ticket.subject}, {'urgent' if ticket.urgent else 'not urgent'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
