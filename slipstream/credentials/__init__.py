"""Files of credentials: whether certificates and keys can be used, who may read a secret, the user's name.

Must not import `calls`, `cli` or `rpc`.
"""
