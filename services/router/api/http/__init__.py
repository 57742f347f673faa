"""What every public HTTP request gets around its handler, and the encodings of its body.

Must not import the routes, the OpenAI shapes or anything that runs requests.
"""
