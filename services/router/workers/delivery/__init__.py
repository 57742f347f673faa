"""When tokens that workers sent are delivered, and in which order of tenants.

Must not import `connection`, `fleet`, `decode_client` or `remote_sequence`.
"""
