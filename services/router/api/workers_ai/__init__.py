"""Workers AI's shapes of a run: its bodies, envelope, event stream and error codes.

Must not import the JSON shapes of other APIs, except OpenAI's, into which its bodies are rewritten.
"""
