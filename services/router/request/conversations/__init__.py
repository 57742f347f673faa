"""Encoded conversations, kept message by message: the next turn encodes its new messages only. Pure.

Must not import anything that does I/O, nor the rest of `services/router/request`.
"""
