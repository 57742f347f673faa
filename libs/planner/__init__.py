"""The planner: which cut of a model over cards fits, and how fast each is, by arithmetic alone.

It runs where no model is loaded. Must not import `torch`, `grpc`, `aiohttp`, `text`, `worker` or `services`.
"""
