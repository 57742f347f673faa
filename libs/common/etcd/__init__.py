"""A client for etcd: keys, compare-and-swap, leases, watches, fail-over between members.

Must not import any other package of libs but libs.common.rpc and the modules of libs.common itself.
"""
