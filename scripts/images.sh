#!/bin/sh
# Build the images of the tiers that the arguments name, all by default.
#   BUILDER  buildah, podman or docker; the first one found
#   BASE     an image with Python 3.11 and apt; the Containerfile's default
#   TORCH    cpu or cuda; cpu
#   TAG      of the images; the project's version, with -cuda after it where TORCH is cuda
set -eu
python=${PYTHON:-.venv/bin/python}
torch=${TORCH:-cpu}

fail() { printf '%s\n' "slipstream: $*" >&2; exit 1; }

builder=${BUILDER:-}
for name in buildah podman docker; do
  [ -n "$builder" ] || ! command -v "$name" >/dev/null 2>&1 || builder=$name
done
[ -n "$builder" ] || fail "no image builder is found: install buildah, podman or docker, or name one in BUILDER"
command -v "$builder" >/dev/null 2>&1 || fail "the image builder '$builder' is not found"
case $torch in cpu | cuda) ;; *) fail "TORCH must be cpu or cuda, not '$torch'" ;; esac
[ $# -gt 0 ] || set -- router prefill decode kvstore drafter
for tier in "$@"; do
  case $tier in router | prefill | decode | kvstore | drafter) ;; *) fail "no tier is named '$tier'" ;; esac
done

make -s wheels
TORCH=$torch PYTHON=$python sh scripts/wheelhouse.sh
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
suffix=; [ "$torch" = cpu ] || suffix=-$torch
layers=; [ "$builder" = docker ] || layers=--layers
for tier in "$@"; do
  image=localhost/slipstream-$tier:${TAG:-$version$suffix}
  # shellcheck disable=SC2086 # no option at all where it is empty
  "$builder" build -q $layers -f deploy/images/Containerfile --target "$tier" -t "$image" \
    ${BASE:+--build-arg "BASE=$BASE"} --build-arg "WHEELHOUSE=.cache/wheelhouse/$torch" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" . >/dev/null
  echo "$image"
done
