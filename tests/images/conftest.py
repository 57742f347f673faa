"""The images, built once for all tests of this folder. Takes minutes: `make test-images` runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.images.cluster import ContainerCluster
from bench.images.image import TIERS, Image, buildah, mounted, why_no_containers
from slipstream.errors import FailedPrecondition

ROOT = Path(__file__).resolve().parents[2]
TAG = "test"
BASE = "localhost/slipstream-test-base:bookworm"
BASE_VARIABLE = "BASE"
TAG_VARIABLE = "TAG"  # of images that are there: they are tested, and none is built
BUILD_S = 3000.0
# A root without a registry: Debian's Python. usr-is-merged instead of usrmerge, which wants Perl.
_DEBIAN = ("--variant=minbase", "--include=usr-is-merged,ca-certificates,python3-minimal,libpython3-stdlib")
_MERGED = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"


def _base_image(work_dir: Path) -> str:
    """The base image: the one that BASE names, that of an earlier run, or one of Debian's packages."""
    if named := os.environ.get(BASE_VARIABLE):
        return named
    try:
        buildah("inspect", "--type", "image", BASE)
        return BASE
    except FailedPrecondition:
        pass
    if shutil.which("mmdebstrap") is None:
        pytest.skip(f"mmdebstrap is not installed, and {BASE_VARIABLE} names no base image")
    tarball = work_dir / "base.tar"
    made = subprocess.run(
        ["mmdebstrap", *_DEBIAN, _MERGED, "bookworm", str(tarball)],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    if made.returncode != 0:
        pytest.skip(f"mmdebstrap made no base image: {made.stderr.strip()[-300:]}")
    (work_dir / "Containerfile").write_text(
        "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n"
    )
    buildah("build", "-q", "-t", BASE, str(work_dir), timeout_s=BUILD_S)
    return BASE


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Image]]:
    """All images by tier, mounted."""
    if reason := why_no_containers():
        pytest.skip(reason)
    tag = os.environ.get(TAG_VARIABLE) or _build(tmp_path_factory.mktemp("base"))
    with ExitStack() as stack:
        yield {tier: stack.enter_context(mounted(f"localhost/slipstream-{tier}:{tag}")) for tier in TIERS}


def _build(work_dir: Path) -> str:
    """Build the images as `make images` does; returns their tag."""
    base = _base_image(work_dir)
    environment = {
        "BUILDAH_ISOLATION": "chroot",
        **os.environ,
        "BUILDER": "buildah",
        "BASE": base,
        "TAG": TAG,
    }
    built = subprocess.run(
        ["make", "-s", "images"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BUILD_S
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return TAG


@pytest.fixture
def containers(images: Mapping[str, Image], tmp_path: Path) -> Iterator[ContainerCluster]:
    """A cluster of the five images, ready."""
    with ContainerCluster(images, tmp_path) as cluster:
        yield cluster
