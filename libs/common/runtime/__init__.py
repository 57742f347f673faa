"""The process: options, garbage collection, allocator, event loop.

Must not import other packages of `libs.common`.
"""
