"""How many replicas of each tier the load wants, and which one a scale-down loses least with.

`decision`, `removal` and `settings` are pure. `signals` reads the fleet; `scaler` and `service` answer over
gRPC. Must not import `api`, `console` or `execution`.
"""
