"""Anthropic's Messages API: bodies -> requests, and events of answers in its form.

It must not import services.router.execution.
"""
