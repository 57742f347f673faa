"""Requests at the endpoints: conversations, cancels, ends, overload, traces, examples of the docs."""
