"""OpenAI's Responses API: bodies and items -> requests, events of answers, and stored responses.

Pure but for the store; it must not import services.router.execution.
"""
