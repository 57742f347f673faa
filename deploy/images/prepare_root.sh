#!/bin/sh
# Makes a base image's root the root of a service: a user, compiled standard library, nothing that no service reads.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # dpkg wants ldconfig, and a base image's own PATH may lack it
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "BASE needs Python 3.11 or newer" >&2; exit 1; }
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

# Libraries look the user up; without an entry some of them fail.
grep -q '^slipstream:' /etc/passwd || {
  echo 'slipstream:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd
  echo 'slipstream:x:65532:' >> /etc/group
}
mkdir -p /data /models
chown 65532:65532 /data

# Installers, editors and tests of Python. The packages that the system's own tools need stay in dist-packages.
rm -rf "$library"/site-packages/* "$library"/ensurepip "$library"/idlelib "$library"/lib2to3 "$library"/test \
  "$library"/tkinter "$library"/turtledemo "$library"/config-* "$library"/distutils/command/*.exe
rm -f /usr/local/bin/pip* /usr/local/bin/idle* /usr/local/bin/2to3* /usr/local/bin/pydoc* /usr/local/lib/libpython*.a

# Only scripts of dpkg, apt and debconf run Perl.
# Python has codecs of its own, so glibc's are not read. Licences stay; packages' lists stay for scanners.
dpkg --purge --force-depends --force-remove-essential --force-remove-protected apt perl-base
rm -rf /usr/share/man /usr/share/info /usr/share/locale /usr/share/lintian /usr/lib/*/gconv /var/lib/apt /var/cache/* /var/log/*
find /usr/share/doc -mindepth 2 ! -name copyright ! -type d -delete
find / -xdev -type f -perm /6000 -exec chmod a-s {} +

# The hash is in the file and is not compared: the root is read-only, and copies change no bytecode's validity.
find "$library" -name '*.pyc' -delete
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash "$library"
