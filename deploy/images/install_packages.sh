#!/bin/sh
# Installs the wheels of /wheels/packages into the virtual environment /opt/slipstream, without network and resolver.
set -eu
prefix=/opt/slipstream
python3 -m venv --without-pip "$prefix"
pip=$(echo /wheels/pip/pip-*.whl)/pip
"$prefix/bin/python" "$pip" --disable-pip-version-check install -q --root-user-action ignore --no-cache-dir --no-compile \
  --no-index --no-deps /wheels/packages/*.whl
packages=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sh /build/prune_packages.sh "$packages"
# The hash is in the file and is not compared: no time stamp of a copy makes bytecode stale.
# Packages have files for newer Pythons, which do not compile and are not imported.
"$prefix/bin/python" -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$packages" || :
