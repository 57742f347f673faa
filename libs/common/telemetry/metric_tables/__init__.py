"""The table of all metrics, by service, with the names that they have as vLLM's.

Must not import `counters`, `exposition`, `logs` or `tracing`.
"""
