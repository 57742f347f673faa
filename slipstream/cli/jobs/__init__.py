"""`slipstream jobs`: submit, list, show and cancel stored jobs.

Must not import `fleet` or `top`.
"""
