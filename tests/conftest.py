"""Settings of all tests."""

from hypothesis import settings

# How long an example takes says nothing on a shared machine; pytest-timeout bounds the whole test.
settings.register_profile("slipstream", deadline=None)
settings.load_profile("slipstream")
