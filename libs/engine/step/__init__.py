"""The engine's interface and the records of one step.

Must not import other packages of the engine.
"""
