"""What prefill and decode workers share around an engine.

Must not import `services`.
"""
