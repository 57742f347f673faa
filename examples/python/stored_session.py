"""A session goes on by the id of its last answer: the client sends new messages alone.

python examples/python/stored_session.py [HOST:PORT]        default: 127.0.0.1:7000

The router needs --database. `/v1/responses` knows the same ids.
"""

from __future__ import annotations

import sys

from slipstream import Client, SlipstreamError


def main(endpoint: str) -> None:
    """Two turns, of which the second one names the first."""
    rules = {
        "role": "system",
        "content": "You answer the customers of Blue Harbor. The warranty lasts 12 months.",
    }
    with Client(endpoint) as client:
        first = client.chat(
            [rules, {"role": "user", "content": "How long is the warranty?"}], store=True, max_tokens=60
        )
        second = client.chat(
            [{"role": "user", "content": "Thank you!"}],
            previous_response_id=first.response_id,
            max_tokens=60,
        )
    assert first.usage is not None and second.usage is not None
    print(first.text)
    print(f"{second.usage.prompt_tokens - first.usage.prompt_tokens} tokens more in the second prompt")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
