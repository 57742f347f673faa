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
# The C libraries compile beside the downloads: pip keeps one core busy.
"$python" server/native_build.py &
native=$!
# A venv without pip is left from an interrupted set-up, so it is created again.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || { say "creating $venv"; "$python" -m venv --clear "$venv"; }
pip="$venv/bin/python -m pip --disable-pip-version-check"
# All cores compile Python's files at the end: pip compiles with one, and thousands that nothing imports.
install="$pip install -qq --no-compile"
# The pip of Python 3.11 parses requirements some ten times slower than later ones.
$install -c constraints.txt pip 2>/dev/null || say "pip cannot be updated, so installing takes longer"

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# A machine without an NVIDIA GPU gets the CPU build of torch: the CUDA build takes gigabytes, and does not import
# without its CUDA libraries. An index may offer the CPU build under its local version, or as the only build. Else
# uv fetches it from PyTorch's index of CPU builds. TORCH_INDEX_URL overrides all of this.
torch=2.13.0
brings_cuda() { $pip install --dry-run --ignore-installed "torch==$torch" 2>/dev/null | grep -Eq 'nvidia-|triton-'; }
install_by_uv() {
  $install --target "$venv/.uv" uv || return 1
  "$venv/.uv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --torch-backend cpu "torch==$torch"
  failed=$?
  rm -rf "$venv/.uv"
  return $failed
}
install_torch() {
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    $install "torch==$torch" --index-url "$TORCH_INDEX_URL"
  elif has_gpu; then
    $install "torch==$torch"
  elif $install "torch==$torch+cpu" 2>/dev/null; then
    return 0
  elif brings_cuda && install_by_uv; then
    return 0
  else
    $install "torch==$torch"
  fi
}
# Torch is installed first and by its exact version, because with a range pip may choose another build.
if ! $pip show torch >/dev/null 2>&1; then
  say "installing torch $torch"
  install_torch
fi
say "installing slipstream and slipstream-server[$extra]"
# Pins for the isolated build environment too. A CUDA build of torch brings the one Triton that fits it.
names_triton='import importlib.metadata as m; raise SystemExit(not any("triton" in r for r in m.requires("torch") or []))'
PIP_CONSTRAINT=$venv/.constraints.txt
cp constraints.txt "$PIP_CONSTRAINT"
if "$venv/bin/python" -c "$names_triton" 2>/dev/null; then
  grep -v '^triton==' constraints.txt > "$PIP_CONSTRAINT"
fi
export PIP_CONSTRAINT
wait $native
$install -e . -e "server[$extra]"
if has_gpu; then
  $install -e . -e "server[$extra,gpu]"
fi

# Mooncake's engine links libibverbs even for TCP. Without it the KV moves over plain sockets.
has_ibverbs() { "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }
if ! has_ibverbs && command -v apt-get >/dev/null 2>&1; then
  as_root=""
  [ "$(id -u)" = 0 ] || as_root="sudo -n"
  if [ -z "$as_root" ] || $as_root true 2>/dev/null; then
    say "installing libibverbs1"
    by_apt="$as_root apt-get install -y -qq --no-install-recommends libibverbs1"
    { $by_apt || { $as_root apt-get update -qq && $by_apt; }; } >/dev/null 2>&1 || true
  fi
fi
has_ibverbs || say "libibverbs1 is missing and cannot be installed: KV moves over plain sockets instead of Mooncake"
# Of 180 MB of sources these 70 are hardly ever imported, and compile then. Half a second of processor time goes into each MB.
rare='/site-packages/(.*/)?(tests?|transformers/models|networkx|mypyc?|pip|pygments/lexers|openai/resources|scipy/signal'
rare="$rare|torch/_inductor|torch/testing/_internal)/"
"$venv/bin/python" -m compileall -q -j 0 -x "$rare" "$venv/lib" >/dev/null 2>&1 || true
touch "$venv/.$extra"
