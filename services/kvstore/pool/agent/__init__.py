"""The process that runs Mooncake Store's client for a node: `python -m services.kvstore.pool.agent`.

Must not import `agent_client`, `tier` or `core`.
"""
