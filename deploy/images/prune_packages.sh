#!/bin/sh
# Removes from the packages in $1 what no service imports or runs. The .dist-info folders stay: they are the bill of materials.
set -eu
cd "$1"
find . -depth -type d -name tests -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' \) -delete
# Of numpy: the build of Fortran extensions.
rm -rf numpy/f2py numpy/distutils
# Of torch: C++ tests, headers for extensions, test tools. torch looks for torch_shm_manager when it is imported.
if [ -d torch ]; then
  rm -rf torch/test torch/include torch/share torch/lib/*_test.so torch/lib/libshm_windows
  find torch/bin -type f ! -name torch_shm_manager -delete
fi
# Of Mooncake: its benchmark. mooncake_master stays, a pool needs it.
rm -f mooncake/transfer_engine_bench
# Of torch's requirements: setuptools, which only the build of extensions needs.
rm -rf setuptools setuptools-*.dist-info pkg_resources _distutils_hack distutils-precedence.pth
# Of the `slipstream` command, which runs where the operator is: what no service imports.
for package in typer rich pygments markdown_it_py mdurl shellingham annotated_doc prompt_toolkit wcwidth pydantic pydantic_core \
  annotated_types typing_inspection; do
  rm -rf "${package%_py}" "$package"-*.dist-info
done
rm -f ../../../bin/typer ../../../bin/pygmentize ../../../bin/markdown-it
