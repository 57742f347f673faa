"""The computation of a layer, in C and in torch, behind one interface.

Must not import `model` or `core`.
"""
