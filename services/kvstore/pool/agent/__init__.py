"""The process that runs Mooncake Store's client for a node: `python -m services.kvstore.pool.agent`.

Must not import `pool.agent_client` or the modules above it.
"""
