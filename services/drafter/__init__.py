"""The drafter: proposes tokens with an EAGLE-3 head.

Must not import another service.
"""
