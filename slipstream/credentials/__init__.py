"""Files of credentials: whether certificates and keys can be used, and who may read a secret.

Must not import `calls`, `cli` or `rpc`.
"""
