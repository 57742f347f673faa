"""The surfaces that clients speak to: HTTP in OpenAI's form, and gRPC.

Both build `request` types. No other package of the router imports it.
"""
