"""The drafter: proposes tokens with an EAGLE-3 head.

Must not import `decode`, `kvstore`, `prefill` or `router`.
"""
