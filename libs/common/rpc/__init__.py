"""gRPC of all services: the server, who may call it, its health, and streams of many commands.

Channels, tokens and errors are in `slipstream/rpc/`. Must not import `cluster`, `etcd`, `http`,
`kv_events` or `transport`.
"""
