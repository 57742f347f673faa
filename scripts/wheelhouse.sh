#!/bin/sh
# Download the wheels that the images install, for $TORCH (cpu or cuda), into .cache/wheelhouse/$TORCH: a folder for
# each of router, kvstore and engine, and one with pip. Nothing is downloaded again until a pin changes.
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
    download "$wheelhouse/engine" --no-deps --index-url "$TORCH_INDEX_URL" "torch==$version"
  elif [ "$torch" = cuda ]; then
    download "$wheelhouse/engine" --no-deps "torch==$version"
  else
    download "$wheelhouse/engine" --no-deps "torch==$version+cpu" 2>/dev/null \
      || download "$wheelhouse/engine" --no-deps "torch==$version"
  fi
}
# Whether the build is the one that was asked for: an index offers both, or only one of them.
check_torch() {
  found=$("$python" -c '
import sys, zipfile
names = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in names.namelist() if name.endswith(".dist-info/METADATA"))
cuda = any(line.startswith(("Requires-Dist: nvidia-", "Requires-Dist: cuda-")) for line in names.read(metadata).decode().splitlines())
print("cuda" if cuda else "cpu")' "$wheelhouse"/engine/torch-*.whl)
  [ "$found" = "$torch" ] && return
  rm -rf "$wheelhouse"
  say "the package index has the $found build of torch, not the $torch build: name PyTorch's index of it in TORCH_INDEX_URL" >&2
  exit 1
}

stamp=$(cat constraints.txt pyproject.toml server/pyproject.toml scripts/wheelhouse.sh | sha256sum)
[ "$(cat "$wheelhouse/stamp" 2>/dev/null)" = "$stamp" ] && exit
say "downloading wheels into $wheelhouse"
rm -rf "$wheelhouse"
mkdir -p "$wheelhouse"
download "$wheelhouse/pip" --no-deps pip
download_torch
check_torch
for extra in router kvstore engine; do
  download "$wheelhouse/$extra" -c constraints.txt --find-links dist --find-links "$wheelhouse/engine" "slipstream-server[$extra]"
  rm "$wheelhouse/$extra"/slipstream*.whl
done
printf '%s\n' "$stamp" > "$wheelhouse/stamp"
