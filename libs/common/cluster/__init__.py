"""The cluster's records: workers in discovery, placements of sessions, exit reports, drains.

Must not import kv_events or transport, nor anything of services, libs.engine or libs.worker.
"""
