"""The part of the server's build that pyproject.toml cannot describe: C libraries for ctypes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))
from native_build import ROOT, NativeLibrary, compile_library, libraries

_LIBRARIES: dict[str, NativeLibrary] = {library.module: library for library in libraries()}


class BuildNative(build_ext):
    """Compiles each library with its own flags and without Python headers."""

    def initialize_options(self) -> None:
        """See `Command`."""
        super().initialize_options()
        self._digests: dict[str, str] = {}

    def get_ext_filename(self, fullname: str) -> str:
        """A file name without the interpreter's version, which the library does not depend on."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Put one library where the build collects it: the source tree's if it is current, else a new one."""
        library, output = _LIBRARIES[ext.name], Path(self.get_ext_fullpath(ext.name))
        if library.is_current():
            output.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / library.path, output)
            self._digests[ext.name] = library.digest()
        else:
            self._digests[ext.name] = compile_library(library, output)

    def copy_extensions_to_source(self) -> None:
        """Of an editable install: beside each library goes the digest of its sources."""
        super().copy_extensions_to_source()
        for name, digest in self._digests.items():
            _LIBRARIES[name].write_digest(digest)


class NativeWheel(bdist_wheel):
    """A wheel for this kind of machine and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """The libraries depend on the platform and on no Python ABI."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension(module, sources=[]) for module in _LIBRARIES],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
