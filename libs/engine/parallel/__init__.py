"""One model over several processes: tensor, pipeline, expert and attention-data parallelism, KV by position.

Rank 0 serves and samples; the other ranks follow its command stream. Must not import `core`, `eagle` or
`scheduling`.
"""
