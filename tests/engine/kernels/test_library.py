"""The choice of the compiled library, and the errors if it is missing or the processor is too old."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from libs.engine.kernels import library
from libs.engine.kernels.library import load_library, processor_level
from libs.engine.kernels.native import NativeKernels
from libs.engine.model.runner import ModelRunner, RunnerOptions
from libs.engine.model_spec.matrix import DenseMatrix
from slipstream.errors import FailedPrecondition
from tests.support.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).resolve().parents[3]
X86 = pytest.mark.skipif(processor_level() == 0, reason="levels are those of x86-64")
BUILD: dict[str, Any] = runpy.run_path(str(ROOT / "server" / "native_build.py"))


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_the_libraries_are_compiled_from_their_sources() -> None:
    """If this fails, a C source has changed: run `make native`."""
    assert [str(built.path) for built in BUILD["libraries"]() if not built.is_current()] == []


def test_a_library_is_outdated_when_a_source_or_a_flag_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind, build_in_place = BUILD["NativeLibrary"], BUILD["build_in_place"]
    monkeypatch.setitem(kind.digest.__globals__, "ROOT", tmp_path)
    built = kind("pack.lib", ("-shared", "-fPIC"))
    built.source_dir.mkdir(parents=True)
    source = built.source_dir / "lib.c"
    source.write_text("int answer(void) { return 42; }\n")
    assert not built.is_current()
    build_in_place([built])
    assert built.is_current()
    os.utime(source)  # a checkout changes times and no bytes
    assert built.is_current()
    assert not kind("pack.lib", ("-shared", "-fPIC", "-O2")).is_current()
    source.write_text("int answer(void) { return 43; }\n")
    assert not built.is_current()
    build_in_place([built])
    assert built.is_current()
    record = (tmp_path / built.path).with_suffix(".digest")
    record.write_bytes(b"\xff")
    assert not built.is_current()
    record.unlink()
    assert not built.is_current()


def test_a_source_that_changes_while_it_is_compiled_leaves_the_library_outdated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = BUILD["NativeLibrary"]
    monkeypatch.setitem(kind.digest.__globals__, "ROOT", tmp_path)
    built = kind("pack.lib", ("-shared", "-fPIC"))
    built.source_dir.mkdir(parents=True)
    source = built.source_dir / "lib.c"
    source.write_text("int answer(void) { return 42; }\n")

    class Edited:
        """Stands in for `subprocess`: an editor saves while the compiler runs."""

        SubprocessError = subprocess.SubprocessError

        @staticmethod
        def run(command: list[str], **how: Any) -> None:
            subprocess.run(command, **how)
            source.write_text("int answer(void) { return 43; }\n")

    monkeypatch.setitem(kind.digest.__globals__, "subprocess", Edited)
    BUILD["build_in_place"]([built])
    assert not built.is_current()


def test_a_digest_that_cannot_be_written_fails_the_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = BUILD["NativeLibrary"]
    monkeypatch.setitem(kind.digest.__globals__, "ROOT", tmp_path)
    built = kind("pack.lib", ("-shared", "-fPIC"))
    (tmp_path / built.path).with_suffix(".digest").mkdir(parents=True)
    built.source_dir.mkdir(parents=True)
    (built.source_dir / "lib.c").write_text("int answer(void) { return 42; }\n")
    assert not built.is_current()
    with pytest.raises(BUILD["BuildFailed"], match="cannot be written"):
        BUILD["build_in_place"]([built])
    assert not built.is_current()


@X86
def test_the_best_variant_for_the_processor_is_loaded() -> None:
    assert Path(load_library()._name).name == f"_kernels_x86_64_v{processor_level()}.so"
    flags = Path("/proc/cpuinfo").read_text().split()
    assert (processor_level() == 4) == {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}.issubset(
        flags
    )
    assert (processor_level() >= 3) == {"avx2", "fma", "bmi2"}.issubset(flags)


@X86
def test_kernels_for_bf16_pairs_are_loaded_where_the_processor_has_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert library.has_bf16_unit() == (processor_level() == 4 and "avx512_bf16" in flags)
    has_amx = library.has_bf16_unit() and {"amx_tile", "amx_bf16"}.issubset(flags)
    assert library.can_use_amx() == has_amx
    names = [Path(load_library(bf16=True, amx=amx)._name).name for amx in (True, False)]
    plain, pairs, tiles = (
        f"_kernels_x86_64_v{variant}.so" for variant in (processor_level(), "4_bf16", "4_amx")
    )
    lesser = pairs if library.has_bf16_unit() else plain
    assert names == [tiles if has_amx else lesser, lesser]
    load_library.cache_clear()
    monkeypatch.setattr(library, "has_bf16_unit", lambda: False)
    assert Path(load_library(bf16=True)._name).name == plain


# Refuses arch_prctl(ARCH_REQ_XCOMP_PERM) by a seccomp filter, as a container's profile may.
_WITHOUT_AMX = """
import ctypes, logging, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)]
code += [(0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]  # EPERM, else allowed
packed = b"".join(struct.pack("HBBI", *each) for each in code)
rules = ctypes.create_string_buffer(packed, len(packed))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(rules)))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
logging.basicConfig(format="%(message)s")
from libs.engine.kernels.library import load_library
for _ in range(2):
    print(load_library(bf16=True)._name)
print(load_library(bf16=True, amx=False)._name)
"""


@pytest.mark.skipif(not library.can_use_amx(), reason="this machine has no AMX that a system could refuse")
def test_a_kernel_that_refuses_amx_is_named_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_AMX], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("this system has no seccomp")
    assert [Path(line).name for line in done.stdout.split()] == ["_kernels_x86_64_v4_bf16.so"] * 3, done
    reason = "(arch_prctl: Operation not permitted): products take AVX512_BF16"
    assert done.stderr.splitlines() == [f"the kernel refuses AMX to this process {reason}"]


@X86
@pytest.mark.parametrize("level", [1, 5])
def test_a_processor_without_the_level_is_refused(level: int) -> None:
    with pytest.raises(FailedPrecondition, match="this processor has x86-64-v"):
        load_library(level)


def test_a_missing_library_raises_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_random_checkpoint(tmp_path / "model")
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    with pytest.raises(FailedPrecondition, match=r"kernels are missing .* reinstall slipstream-server"):
        ModelRunner.load(tmp_path / "model", RunnerOptions(n_pages=2))
    assert ModelRunner.load(tmp_path / "model", RunnerOptions(n_pages=2, kernels="torch")).kernels == "torch"


def test_a_broken_library_raises_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for built in BUILD["libraries"]():
        (tmp_path / built.path.name).write_bytes(b"no library")
    monkeypatch.setattr(library, "LIBRARY_DIR", tmp_path)
    with pytest.raises(FailedPrecondition, match="do not load"):
        load_library()


@X86
def test_every_variant_computes_the_same_within_rounding() -> None:
    weight = DenseMatrix(torch.randn(96, 544, generator=torch.Generator().manual_seed(0)) / 544**0.5)
    x = torch.randn(37, 544, generator=torch.Generator().manual_seed(1))
    for level in range(2, processor_level() + 1):
        kernels = NativeKernels(load_library(level), 1)
        found = kernels.linear(x, kernels.pack(weight))
        torch.testing.assert_close(found, x @ weight.weight.T, rtol=1e-5, atol=2e-5)


def test_builds_are_portable() -> None:
    for machine in ("x86_64", "aarch64"):
        for built in BUILD["libraries"](machine):
            assert not [flag for flag in built.flags if "native" in flag or flag.startswith("-march")]
    levels = [built.path.name for built in BUILD["libraries"]("AMD64") if "kernels" in built.path.name]
    assert levels == [f"_kernels_x86_64_v{level}.so" for level in ("2", "3", "4", "4_bf16", "4_amx")]
    assert "_kernels_generic.so" in [built.path.name for built in BUILD["libraries"]("aarch64")]


def test_a_failed_build_leaves_no_file_and_shows_the_compilers_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'the disk is full' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    built = BUILD["libraries"]()[0]
    with pytest.raises(BUILD["BuildFailed"], match="does not compile: the disk is full"):
        BUILD["compile_library"](built, tmp_path / "out" / "library.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_sources_compile_without_x86_vectors(tmp_path: Path) -> None:
    """Compile as for another architecture: vectors of four floats, no x86 header."""
    built = BUILD["libraries"]("aarch64")[0]
    # The optimiser takes most of the time, and refuses nothing.
    built = replace(built, flags=tuple("-O0" if flag == "-O3" else flag for flag in built.flags))
    assert "-O0" in built.flags
    output = tmp_path / "generic.so"
    BUILD["compile_library"](built, output)
    assert ctypes.CDLL(str(output)).ss_processor_level() == processor_level()
    symbols = subprocess.run(["nm", "-D", output], capture_output=True, text=True, check=True).stdout
    assert "ss_attend_absorbed" in symbols
