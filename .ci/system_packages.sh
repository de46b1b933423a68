#!/usr/bin/env bash
# What the tests need of the system: EGL and OSMesa, with which MuJoCo draws without a screen, and a browser that looks at
# the page of `burnish report`.
# Installs what is missing where it has the right to; elsewhere it says what to install. Never fails for that reason:
# `burnish doctor` and the tests that need a library say what is wrong.
set -euo pipefail

missing=()
need() { # need LIBRARY PACKAGE: the package is missing if the loader cannot find the library.
    ldconfig -p | grep -q -F "$1" || missing+=("$2")
}
PATH="$PATH:/usr/sbin:/sbin"
if ! command -v ldconfig >/dev/null; then
    echo "system packages: this is not a glibc Linux; nothing to install"
    exit 0
fi
need libEGL.so.1 libegl1
need libEGL_mesa.so.0 libegl-mesa0
need libGL.so.1 libgl1
need libOSMesa.so libosmesa6
command -v chromium >/dev/null || missing+=(chromium)

if [ ${#missing[@]} -eq 0 ]; then
    echo "system packages: all present"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    echo "system packages: please install what your system calls ${missing[*]}"
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
        echo "system packages: please run  sudo apt-get install ${missing[*]}"
        exit 0
    fi
    as_root=(sudo -n)
fi
echo "system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh image are empty; those of a machine in use may be stale: then the first attempt fails.
apt() { "${as_root[@]}" apt-get "$@" >/dev/null; }
apt install -y --no-install-recommends "${missing[@]}" 2>/dev/null \
    || { apt update && apt install -y --no-install-recommends "${missing[@]}"; } \
    || echo "system packages: apt-get could not install ${missing[*]}; tests that need them will say so"
