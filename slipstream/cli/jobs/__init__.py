"""`slipstream jobs`: submit, list, show and cancel stored jobs.

Must not import libs, services or supervisor.
"""
