"""A render is made once for its sources, whole, and never kept when it failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.k8s.render_cache import Objects, kept_render


class Maker:
    """Counts how often it makes a render."""

    def __init__(self) -> None:
        self.n_made = 0

    def __call__(self) -> Objects:
        self.n_made += 1
        return [{"kind": "Service", "number": self.n_made}]


def test_a_render_is_made_once_for_its_sources(tmp_path: Path) -> None:
    make = Maker()
    first = kept_render("overlays/a", "1", make, tmp_path)
    assert kept_render("overlays/a", "1", make, tmp_path) == first == [{"kind": "Service", "number": 1}]
    assert kept_render("overlays/b", "1", make, tmp_path) == [{"kind": "Service", "number": 2}]
    assert make.n_made == 2


def test_other_sources_make_another_render(tmp_path: Path) -> None:
    make = Maker()
    for sources, number in (("a long digest", 1), ("2", 2), ("2", 2), ("a long digest", 3)):
        made = kept_render("base", sources, make, tmp_path)
        assert made == [{"kind": "Service", "number": number}]


def test_a_render_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    make = Maker()
    kept_render("base", "1", make, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-5])
    assert kept_render("base", "1", make, tmp_path) == [{"kind": "Service", "number": 2}]


def test_a_failed_render_is_not_kept(tmp_path: Path) -> None:
    def fail() -> Objects:
        raise AssertionError("kustomize failed")

    with pytest.raises(AssertionError, match="kustomize failed"):
        kept_render("base", "1", fail, tmp_path)
    assert kept_render("base", "1", Maker(), tmp_path) == [{"kind": "Service", "number": 1}]
