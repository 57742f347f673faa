"""How KV bytes move between processes: reads only, by the owner of the destination memory.

base.py says what every transport promises, mooncake.py and socket.py keep it, open.py chooses one.
"""
