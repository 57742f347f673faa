"""How KV bytes move between processes: reads only, by the owner of the destination memory.

Must not import other packages of libs.common, nor anything that knows tokens or requests. base.py is the
contract that mooncake.py and socket.py implement; open.py chooses one of them.
"""
