"""How KV bytes move between processes: reads only, by the owner of the destination memory.

base.py is the contract that mooncake.py and socket.py implement; open.py chooses one of them.
Must not import `cluster`, `etcd`, `http`, `kv_events`, `rpc`, `runtime` or `telemetry`.
"""
