"""Files of credentials: whether certificates and keys can be used, and who may read a secret.

It must not import the parts that call or serve: they import it.
"""
