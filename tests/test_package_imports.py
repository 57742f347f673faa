"""The docstring of each package names what it must not import, and nothing in the package does."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("libs", "services", "slipstream", "supervisor")
# Generated from protos.
GENERATED = ("slipstream/etcd", "slipstream/keda", "slipstream/v1")
_RULE = re.compile(r"Must not import (`[^.]*(?:\.[^.\s][^.]*)*`)\.(?:\s|$)")


def sources() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if (ROOT / path).is_file()]


SOURCES = sources()
PACKAGES = [
    path.removesuffix("/__init__.py")
    for path in SOURCES
    if path.startswith(PRODUCT) and path.endswith("/__init__.py") and not path.startswith(GENERATED)
]


def forbidden(package: str) -> list[str]:
    """The modules that the docstring forbids, by their full names."""
    text = " ".join(
        (ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or "").split()
    )
    rule = _RULE.search(text)
    assert rule, f"{package}: no sentence 'Must not import `..`.'"
    return [full_name(package, name) for name in re.findall(r"`([^`]+)`", rule[1])]


def full_name(package: str, name: str) -> str:
    """The module of that name that is nearest in the tree: beside the package, or beside what it is in."""
    folder, inner = Path(package), name.replace(".", "/")
    for level in (folder, *folder.parents):
        if any((ROOT / level / each).exists() for each in (f"{inner}.py", f"{inner}/__init__.py")):
            return ".".join((*level.parts, *name.split(".")))
    assert importlib.util.find_spec(name), f"{package}: {name} does not exist"
    return name  # of another distribution


@functools.cache
def imported(path: str) -> frozenset[str]:
    """What a module imports anywhere, with the names that it takes from it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_nothing_that_it_must_not(package: str) -> None:
    names = forbidden(package)
    assert names
    broken = [
        f"{path} imports {module}"
        for path in SOURCES
        if path.startswith(f"{package}/")
        for module in imported(path)
        if any(module == name or module.startswith(f"{name}.") for name in names)
    ]
    assert not broken
