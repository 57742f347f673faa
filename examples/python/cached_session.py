"""The second turn of a session finds the KV of the first one.

python examples/python/cached_session.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys

from slipstream import Client, SlipstreamError

RULES = "Returns are possible within 30 days. The warranty lasts 12 months. The store is in Lisbon. " * 5


def main(endpoint: str) -> None:
    """Two turns, with the cached part of each prompt."""
    messages = [{"role": "system", "content": f"You answer the customers of Blue Harbor. {RULES}"}]
    with Client(endpoint) as client:
        for question in ("How long is the warranty?", "Where is the store?"):
            messages.append({"role": "user", "content": question})
            reply = client.chat(messages, session="cached-example", temperature=0.0, max_tokens=60)
            messages.append(reply.as_message())
            assert reply.usage is not None
            print(f"{reply.usage.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens cached")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
