"""Settings of all tests."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# An example's duration means nothing on a shared machine; pytest-timeout bounds the whole test.
settings.register_profile("slipstream", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")

# torch's optimizers and transformers create this directory, by default in /tmp, and leave it behind.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "torchinductor"))

# Files run in this order, in several processes: long ones first, so that none runs alone at the end.
_ROOT = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (_ROOT / "e2e" not in item.path.parents, item.path.parent != _ROOT))


def pytest_collection_finish() -> None:
    """Exempt modules and items, which live until the end, from every later garbage collection."""
    gc.collect()
    gc.freeze()
