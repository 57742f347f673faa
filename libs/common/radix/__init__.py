"""A radix tree with payload and a byte budget per tenant, for every cache of prompt prefixes. Pure.

Must not import any other package of libs or services.
"""
