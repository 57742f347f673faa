"""The process: options, garbage collection, allocator, event loop, signals.

Must not import other packages of `libs.common`.
"""
