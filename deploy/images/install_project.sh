#!/bin/sh
# Installs the wheels of /wheels/project into /project/opt/slipstream, to be copied over an environment.
set -eu
python3 -m venv --without-pip /opt/slipstream
pip=$(echo /wheels/pip/pip-*.whl)/pip
/opt/slipstream/bin/python "$pip" --disable-pip-version-check install -q --root-user-action ignore --no-warn-script-location --no-cache-dir --no-compile \
  --no-index --no-deps --root /project /wheels/project/*.whl
packages=/project$(/opt/slipstream/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The `slipstream` command runs where the operator is; its packages are not installed.
rm -r "$packages/slipstream/cli" /project/opt/slipstream/bin
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /project "$packages"
# Wheels that were built on a newer system need a newer C library than the image has. Here that ends the build.
find "$packages" -name '*.so' -exec python3 -c 'import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]' {} +
