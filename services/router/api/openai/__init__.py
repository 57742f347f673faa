"""Requests and responses in the shapes of OpenAI's HTTP API.

Pure: it imports neither aiohttp nor the rest of the router but `services.router.request`.
"""
