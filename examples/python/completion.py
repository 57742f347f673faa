"""A text goes on without the chat template, from the text or from its tokens; an answer is aborted by its id.

python examples/python/completion.py [HOST:PORT]        default: 127.0.0.1:7000
"""

from __future__ import annotations

import sys
import uuid

from slipstream import Aborted, Client, PromptTokens, ServedModel, SlipstreamError

TEXT = "The warranty of a lamp lasts"


def main(endpoint: str) -> None:
    """Show the model, continue a text twice, and abort a third answer."""
    with Client(endpoint) as client:
        model: ServedModel = client.list_models()[0]  # models() has the names alone
        price = model.pricing
        cost = f"{price.output} {price.currency} a token" if price else "no price"
        print(f"{model.id}: {model.max_context_tokens} tokens of context, {cost}")

        tokens: PromptTokens = client.tokenize(TEXT)
        print(f"{len(tokens)} tokens: {client.detokenize(tokens)}")
        of_text = client.complete(TEXT, temperature=0.0, max_tokens=12)
        of_tokens = client.complete(tokens, temperature=0.0, max_tokens=12)
        print("the same answer" if of_text.text == of_tokens.text else "another answer")

        request_id = f"completion-{uuid.uuid4().hex}"
        stream = client.stream_complete(TEXT, request_id=request_id, max_tokens=10_000, ignore_eos=True)
        try:
            for number, _ in enumerate(stream):
                if number == 0:
                    client.abort(request_id)  # from any client with the same key
        except Aborted:
            print("aborted")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000")
    except SlipstreamError as error:
        sys.exit(f"{sys.argv[0]}: {error.message}")
