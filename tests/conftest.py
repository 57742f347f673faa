"""Settings of all tests."""

import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# An example's duration means nothing on a shared machine; pytest-timeout bounds the whole test.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")

# torch's optimizers and transformers create this directory, by default in /tmp, and leave it behind.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "torchinductor"))


def pytest_collection_finish() -> None:
    """Exempt the modules and items, which live as long as the process, from every later garbage collection."""
    gc.collect()
    gc.freeze()
