"""Regenerate the Python stubs in `slipstream/` from `protos/`.

    python scripts/gen_protos.py           # rewrite the stubs
    python scripts/gen_protos.py --check   # exit 1, naming the files, when they are stale

The folder of a .proto is its Python package, so that the imports of the generated code are right. The
generator is pinned to an old version (grpcio-tools 1.78.0), because generated code refuses older runtimes
than its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = "slipstream"


def generate(out: Path) -> None:
    """Write the stubs of every .proto under `out`."""
    # protoc finds the mypy plugins through PATH, which lacks them if the venv is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sources = sorted(str(path) for path in PROTOS.rglob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *sources,
        ]
    )
    if code:
        raise SystemExit(code)
    for folder in {path.parent for path in out.glob(f"{PACKAGE}/**/*_pb2.py")}:
        (folder / "__init__.py").touch()


def stale(fresh: Path, committed: Path) -> list[str]:
    """Paths of generated files that differ from the committed ones, or exist on one side only."""

    def stubs(root: Path) -> dict[Path, bytes]:
        return {p.relative_to(root): p.read_bytes() for p in root.rglob("*_pb2*.py*") if p.suffix != ".pyc"}

    want, have = stubs(fresh), stubs(committed)
    return sorted(str(path) for path in want.keys() | have.keys() if want.get(path) != have.get(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        if out_of_date := stale(Path(folder) / PACKAGE, ROOT / PACKAGE):
            raise SystemExit("stale stubs, run `make protos`: " + ", ".join(out_of_date))
    print("stubs are fresh")


if __name__ == "__main__":
    main()
