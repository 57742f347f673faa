#!/bin/sh
# Set up $VENV with the extra named by $1 (local or dev). Idempotent; stamps $VENV/.$1.
set -eu
extra=$1
python=${PYTHON:-python3}
venv=${VENV:-.venv}

say() { printf '%s\n' "slipstream: $*"; }

"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null || {
  say "Python 3.11 or newer is needed; '$python' is not. Set PYTHON=/path/to/python3.11." >&2
  exit 1
}
# Without pip an earlier set-up was interrupted: begin again.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || { say "creating $venv"; "$python" -m venv --clear "$venv"; }
pip="$venv/bin/python -m pip --disable-pip-version-check"

# torch first and by exact version: a range lets pip choose another. Where the default wheel index offers
# a build with gigabytes of CUDA and none is wanted, TORCH_INDEX_URL names the index of CPU wheels.
if ! $pip show torch >/dev/null 2>&1; then
  say "installing torch 2.13.0"
  $pip install -q "torch==2.13.0" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
fi
say "installing slipstream and slipstream-server[$extra]"
# The build's own environment takes its pins from here.
PIP_CONSTRAINT=constraints.txt
export PIP_CONSTRAINT
$pip install -q -e . -e "server[$extra]"
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  $pip install -q -e . -e "server[$extra,gpu]"
fi

# Mooncake's engine links libibverbs even for TCP. Without it the KV moves over plain sockets.
has_ibverbs() { "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }
if ! has_ibverbs && command -v apt-get >/dev/null 2>&1; then
  as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  if [ -z "$as_root" ] || $as_root true 2>/dev/null; then
    say "installing libibverbs1"
    install="$as_root apt-get install -y -qq --no-install-recommends libibverbs1"
    { $install || { $as_root apt-get update -qq && $install; }; } >/dev/null 2>&1 || true
  fi
fi
has_ibverbs || say "libibverbs1 is not here and cannot be installed: KV moves over plain sockets instead of Mooncake"
touch "$venv/.$extra"
