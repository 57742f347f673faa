"""HTTP below the routes: connections, malformed messages, and which pages may call.

Must not import the routes, the OpenAI shapes or anything that runs requests.
"""
