#!/usr/bin/env bash
# What the tests need of the system: EGL and OSMesa, with which MuJoCo draws without a screen, Vulkan with Mesa's
# lavapipe, with which ManiSkill does, and a browser that looks at the page of `burnish report`.
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

# lavapipe draws for ManiSkill since Mesa 24.3. Debian 12 has 22.3, and a newer one among its backports.
readonly OLDEST_MESA=24.3
suite=() vulkan=()
mesa_is_old() {
    local version
    command -v dpkg-query >/dev/null || { [ ! -e /usr/share/vulkan/icd.d ]; return; }
    version=$(dpkg-query -W -f='${Version}' mesa-vulkan-drivers 2>/dev/null) || return 0
    ! dpkg --compare-versions "$version" ge "$OLDEST_MESA"
}
if mesa_is_old; then
    vulkan=(mesa-vulkan-drivers libvulkan1)
    if grep -q -s '^VERSION_CODENAME=bookworm' /etc/os-release; then suite=(-t bookworm-backports); fi
fi

if [ ${#missing[@]} -eq 0 ] && [ ${#vulkan[@]} -eq 0 ]; then
    echo "system packages: all present"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    echo "system packages: please install what your system calls ${missing[*]} ${vulkan[*]:+${vulkan[*]} ($OLDEST_MESA or newer)}"
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
        [ ${#missing[@]} -eq 0 ] || echo "system packages: please run  sudo apt-get install ${missing[*]}"
        [ ${#vulkan[@]} -eq 0 ] || echo "system packages: please run  sudo apt-get install ${suite[*]} ${vulkan[*]}"
        exit 0
    fi
    as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh image are empty; those of a machine in use may be stale: then the first attempt fails.
apt() { "${as_root[@]}" apt-get "$@" >/dev/null; }
install() { # install [-t SUITE] PACKAGE...
    echo "system packages: installing $*"
    apt install -y --no-install-recommends "$@" 2>/dev/null \
        || { apt update && apt install -y --no-install-recommends "$@"; } \
        || echo "system packages: apt-get could not install $*; tests that need them will say so"
}
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"
if [ ${#vulkan[@]} -gt 0 ]; then
    if [ ${#suite[@]} -gt 0 ] && ! grep -q -s -r '^[^#]*bookworm-backports' /etc/apt/sources.list /etc/apt/sources.list.d; then
        echo 'deb http://deb.debian.org/debian bookworm-backports main' \
            | "${as_root[@]}" tee /etc/apt/sources.list.d/bookworm-backports.list >/dev/null || suite=()
    fi
    install "${suite[@]}" "${vulkan[@]}"
    ! mesa_is_old || echo "system packages: Mesa is older than $OLDEST_MESA, so ManiSkill cannot draw without a GPU"
fi
