"""The surfaces that clients speak to: HTTP in OpenAI's form, and gRPC.

Both build `request` types. Must not import `autoscale`, `console` or `operators`.
"""
