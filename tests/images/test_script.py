"""What `make images` says where it cannot build. Needs no builder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "no image builder is found: install buildah, podman or docker"),
        ([], {"BUILDER": "kaniko"}, "the image builder 'kaniko' is not found"),
        ([], {"BUILDER": "true", "TORCH": "rocm"}, "TORCH must be cpu or cuda, not 'rocm'"),
        (["router", "etcd"], {"BUILDER": "true"}, "no tier is named 'etcd'"),
    ],
)
def test_a_build_that_cannot_start_names_the_reason(
    arguments: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "true").symlink_to("/bin/true")
    refused = subprocess.run(
        ["/bin/sh", "scripts/images.sh", *arguments],
        cwd=ROOT,
        env={"PATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 1
    assert message in refused.stderr
