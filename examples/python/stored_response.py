"""A stored answer, found again by its id with its conversation, and deleted.

python examples/python/stored_response.py [HOST:PORT]        default: 127.0.0.1:7000

The router needs --database. `/v1/responses` knows the same ids.
"""

from __future__ import annotations

import sys

from slipstream import Client, NotFound, SavedResponse, SlipstreamError


def main(endpoint: str) -> None:
    """Store an answer, show it and what it was asked, and delete it."""
    messages = [
        {
            "role": "system",
            "content": "You answer the customers of Blue Harbor. The warranty lasts 12 months.",
        },
        {"role": "user", "content": "How long is the warranty?"},
    ]
    with Client(endpoint) as client:
        reply = client.chat(messages, store=True, max_tokens=60)
        found: SavedResponse = client.responses.get(reply.response_id)
        assert found.usage is not None
        print(f"{found.status}, {found.usage.completion_tokens} tokens: {found.text}")
        for item in client.responses.input_items(found.id, oldest_first=True):
            print(f"{item.role}: {item.text}")
        client.responses.delete(found.id)
        try:
            client.responses.get(found.id)
        except NotFound:
            print("deleted")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
