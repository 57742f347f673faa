"""The APIs for clients: HTTP in the forms of OpenAI, Anthropic and Workers AI, and gRPC.

Both build `request` types. Must not import `autoscale`, `console` or `operators`.
"""
