"""How the supervisor starts processes: as forks of a process that has imported their modules, or by exec.

The fork server (server.py) must not create threads, channels or event loops. No service imports this
package. Must not import `commands`, `grpc` or `services`.
"""
