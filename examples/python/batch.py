"""A file of requests, run as a batch, and its answers by their ids.

python examples/python/batch.py [HOST:PORT]        default: 127.0.0.1:7000

The router needs --database. `/v1/files` and `/v1/batches` know the same ids.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from slipstream import BatchAnswer, BatchFile, Client, SlipstreamError, SubmittedBatch

QUESTIONS = {"return": "Can I return a lamp?", "greeting": "Hello!"}


def line(custom_id: str, messages: Sequence[Any]) -> str:
    """One request of the file."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request) + "\n"


def main(endpoint: str) -> None:
    """Upload the requests, wait for the batch, and read its answers and its failures."""
    asked = {name: [{"role": "user", "content": text}] for name, text in QUESTIONS.items()}
    lines = [line(name, messages) for name, messages in asked.items()] + [line("none", [])]
    with Client(endpoint) as client:
        print(f"{sum([len(client.tokenize(messages)) for messages in asked.values()])} tokens to read")
        # A path is read in pieces, and so may be larger than the memory.
        file: BatchFile = client.files.upload("".join(lines).encode(), name="questions.jsonl")
        batch: SubmittedBatch = client.batches.create(file.id, metadata={"for": "an example"})
        batch = client.batches.wait(batch.id, timeout_s=600)
        answers: dict[str, BatchAnswer] = {each.custom_id: each for each in client.batches.answers(batch)}
        for name in QUESTIONS:
            message = answers[name].body["choices"][0]["message"]
            print(f"{name} -> {message['content'] or 'a tool call'}")
        for failure in client.batches.failures(batch):
            reason = failure.error or failure.body["error"]["message"]
            print(f"{failure.custom_id}: {failure.http_status} {reason}")
        client.files.delete(file.id)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
