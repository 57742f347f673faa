"""Settings of all tests."""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import USUAL_EXAMPLES
from tests.support.file_order import order_files
from tests.support.forked_tests.compilation import compiling_from_the_end

# An example's duration means nothing on a shared machine; pytest-timeout bounds the whole test. Each
# run draws other examples. Where CI is set, Hypothesis would draw the same ones.
settings.register_profile(
    "slipstream",
    max_examples=USUAL_EXAMPLES,
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
# That of `make soak`.
settings.register_profile("thorough", settings.get_profile("slipstream"), max_examples=10 * USUAL_EXAMPLES)
settings.load_profile("slipstream")

pytest_plugins = ("tests.support.forked_tests.plugin",)

# torch's optimizers and transformers create this directory, by default in /tmp, and leave it behind.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "torchinductor"))

_ROOT = Path(__file__).parent
# With Python's 700, collections take a tenth of the tests' processor time; with this, a thirtieth.
_OBJECTS_UNTIL_COLLECTION = 20_000


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without garbage collections, and for several processes with help to compile the files."""
    gc.disable()
    config = session.config
    is_all = config.args == config.getini("testpaths")
    with (
        compiling_from_the_end(_ROOT, _ROOT.parent)
        if config.option.processes > 1 and is_all
        else contextlib.nullcontext()
    ):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files that several processes run; one process runs them by name."""
    if config.option.processes:
        order_files(_ROOT, items)


def pytest_collection_finish() -> None:
    """Exempt modules and items, which live until the end, from every later garbage collection.

    The garbage of the collection, 20 MB, stays with them: a search for it takes longer than all later ones.
    Kernels of a test that names no number of threads take one: several would wait for cores of other tests.
    pytest captures a logger that does not propagate by a separate handler, six times a test. torch has forty.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        for name in filter(_is_of_torch, logging.root.manager.loggerDict):
            logging.getLogger(name).propagate = True


def _is_of_torch(logger_name: str) -> bool:
    return logger_name.partition(".")[0] == "torch"
