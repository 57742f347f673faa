#!/bin/sh
# Set up the environments of `make test-clients`: two of Python in .venv-clients, and the packages of Node.
# Idempotent: an environment is made again when its list of packages changes. Where Node or a registry is
# missing, the tests of those clients are skipped.
set -eu
python=${PYTHON:-python3}
clients=tests/clients

say() { printf '%s\n' "slipstream: $*"; }

# litellm and instructor need an openai that is older than the others'.
for name in openai2 openai3; do
  list=$clients/python/requirements-$name.txt
  venv=.venv-clients/$name
  if cmp -s "$list" "$venv/.installed"; then continue; fi
  say "setting up $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # The lists are whole: nothing has to be resolved.
  if "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-deps -r "$list"; then
    cp "$list" "$venv/.installed"
  else
    say "the packages of $list cannot be installed: their clients are not tested" >&2
    rm -rf "$venv"
  fi
done

node=$clients/node
if ! command -v node >/dev/null 2>&1 || ! command -v npm >/dev/null 2>&1; then
  say "node or npm is missing: the clients of Node are not tested" >&2
elif ! cmp -s "$node/package-lock.json" "$node/node_modules/.installed"; then
  say "setting up $node/node_modules"
  if npm --prefix "$node" ci --ignore-scripts --no-audit --no-fund --loglevel=error; then
    cp "$node/package-lock.json" "$node/node_modules/.installed"
  else
    say "the packages of $node cannot be installed: the clients of Node are not tested" >&2
    rm -rf "$node/node_modules"
  fi
fi
