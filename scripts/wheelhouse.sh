#!/bin/sh
# Download the wheels that the images install, for $TORCH (cpu or cuda), into .cache/wheelhouse/$TORCH: a folder for
# each of router, kvstore and engine, and one with pip. Nothing is downloaded again until a requirement or pin changes.
# dist/ has the project's wheels.
set -eu
python=${PYTHON:-.venv/bin/python}
torch=${TORCH:-cpu}
version=2.13.0
wheelhouse=.cache/wheelhouse/$torch

say() { printf '%s\n' "slipstream: $*"; }
# For the Python of the images, which may be newer or older than that of .venv.
download() {
  "$python" -m pip --disable-pip-version-check download -q --only-binary :all: --python-version 3.11 -d "$@"
}
download_torch() {
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    download "$wheelhouse/all" --no-deps --index-url "$TORCH_INDEX_URL" "torch==$version"
  elif [ "$torch" = cuda ]; then
    download "$wheelhouse/all" --no-deps "torch==$version"
  else
    download "$wheelhouse/all" --no-deps "torch==$version+cpu" 2>/dev/null || download "$wheelhouse/all" --no-deps "torch==$version"
  fi
}
requirements() {
  "$python" -c '
import sys, zipfile
for path in sys.argv[1:]:
    wheel = zipfile.ZipFile(path)
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    lines = wheel.read(metadata).decode().splitlines()
    print(*[line for line in lines if line.startswith("Requires-Dist:")], sep="\n")' "$@"
}
# An index has both builds of torch, or one of them.
check_torch() {
  found=cpu
  if requirements "$wheelhouse"/all/torch-*.whl | grep -Eq ': (nvidia|cuda)-'; then found=cuda; fi
  [ "$found" = "$torch" ] && return
  say "the package index has the $found build of torch and not the $torch build: name PyTorch's index in TORCH_INDEX_URL" >&2
  exit 1
}

stamp=$( (requirements dist/*.whl && cat constraints.txt scripts/wheelhouse.sh) | sha256sum)
[ "$(cat "$wheelhouse/stamp" 2>/dev/null)" = "$stamp" ] && exit
say "downloading wheels into $wheelhouse"
rm -rf "$wheelhouse"
mkdir -p "$wheelhouse"
download "$wheelhouse/pip" --no-deps pip
download_torch
check_torch
# The CUDA build of torch names the one Triton that fits it; without that build an image has none.
grep -v '^triton==' constraints.txt > "$wheelhouse/all/constraints.txt"
download "$wheelhouse/all" -c "$wheelhouse/all/constraints.txt" --find-links dist --find-links "$wheelhouse/all" \
  "slipstream-server[router,kvstore,engine]"
for extra in router kvstore engine; do
  download "$wheelhouse/$extra" --no-index --find-links "$wheelhouse/all" "slipstream-server[$extra]"
  rm "$wheelhouse/$extra"/slipstream*.whl
done
rm -r "$wheelhouse/all"
printf '%s\n' "$stamp" > "$wheelhouse/stamp"
