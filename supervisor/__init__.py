"""The local cluster: starts etcd and the services as processes, watches them, stops them.

No service and no library imports it; it knows the services as commands that it runs. Must not import
`bench`, `models` or `tests`.
"""
