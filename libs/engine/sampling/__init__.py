"""From logits to tokens: sampling, draft verification, stop conditions.

May import `step` only.
"""
