"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says nothing on a shared machine; pytest-timeout bounds the whole test.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")
