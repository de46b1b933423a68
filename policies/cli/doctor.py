"""``burnish doctor``: what this machine has, what it lacks, and what to install for it.

Nothing is imported at the head that could be missing: a doctor who needs a healthy patient is of no use. Graphics
drivers may kill the process that asks them, so they are asked by a child process. The probe of the renderer is a text
handed to that child; this folder itself never imports a simulator.
"""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import reason
from ..core.threads import usable_cores

GIGABYTE = 1e9
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a name, whether it is fine, the detail that was seen, and the remedy."""

    name: str
    ok: bool | None  # True: fine; False: required and missing; None: optional and missing
    detail: str
    advice: str = ""


def python() -> Finding:
    """The version of Python, which must be at least ``OLDEST_PYTHON``."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", False, version, "Burnish needs Python 3.11 or newer: make the venv with that one")
    return Finding("python", True, f"{version} in {sys.prefix}")


def packages() -> Finding:
    """The distributions that Burnish declares as dependencies, the extras left out."""
    try:
        required = [line for line in importlib.metadata.requires("burnish") or [] if "extra ==" not in line]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", False, "burnish itself is not installed", "run `pip install -e .` in its folder")
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required]
    missing = [name for name in names if not _installed(name)]
    if missing:
        return Finding(
            "packages", False, "missing: " + ", ".join(missing), "run `pip install " + " ".join(missing) + "`"
        )
    return Finding("packages", True, f"all {len(names)} dependencies are installed")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def torch() -> Finding:
    """The version of torch and its number of threads, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # A wheel for another machine fails as OSError while it loads libraries.
        advice = "run `pip install torch==2.13.0` (for the small build without CUDA, add "
        return Finding(
            "torch", False, reason(error), advice + "`--extra-index-url https://download.pytorch.org/whl/cpu`)"
        )
    return Finding("torch", True, f"{module.__version__}, {module.get_num_threads()} threads")


def gpu() -> Finding:
    """The CUDA devices that torch sees, with their memory in GB; none is no failure."""
    try:
        cuda = importlib.import_module("torch").cuda
        found = [
            f"{cuda.get_device_name(i)}, {cuda.get_device_properties(i).total_memory / GIGABYTE:.0f} GB"
            for i in range(cuda.device_count())
        ]
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("gpu", None, reason(error), "make `import torch` work first")
    if found:
        return Finding("gpu", True, "; ".join(found))
    if Path("/proc/driver/nvidia/version").exists():
        advice = "a driver is loaded, but this torch cannot use it: install a CUDA build of torch that fits the driver"
    else:
        advice = "none is needed for the toy worlds; training from images wants one (NVIDIA driver and a CUDA torch)"
    return Finding("gpu", None, "no CUDA device", advice)


# The child loads the library, draws, refuses a blank image, and reports milliseconds of the second, warm image.
_RENDER = """
import time, mujoco
model = mujoco.MjModel.from_xml_string(
    '<mujoco><worldbody><light pos="0 0 3"/><geom size=".1" rgba="1 0 0 1"/></worldbody></mujoco>'
)
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    for _ in range(2):
        start = time.perf_counter()
        renderer.update_scene(data)
        image = renderer.render()
        elapsed = time.perf_counter() - start
assert image.shape == (32, 32, 3) and image.std() > 0, "the image is blank"
print(1000 * elapsed)
"""


def draw(backend: str, timeout_s: float = 60.0) -> float | str:
    """Milliseconds that a 32x32 image takes with MUJOCO_GL=``backend``, or why there is none."""
    environment = {**os.environ, "MUJOCO_GL": backend}
    command = [sys.executable, "-c", _RENDER]
    try:
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no image after {timeout_s:.0f} s"
    if child.returncode == 0:
        return float(child.stdout.split()[-1])
    lines = child.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with status {child.returncode}"


def rendering() -> Finding:
    """The first OpenGL backend of MuJoCo that draws here, with its time per image in ms."""
    chosen = os.environ.get("MUJOCO_GL")
    reasons = []
    for backend in dict.fromkeys(filter(None, (chosen, "egl", "osmesa", "glfw"))):
        result = draw(backend)
        if isinstance(result, float):
            # Burnish finds it by itself; what MUJOCO_GL says goes first, and is wrong if another one draws.
            advice = "" if chosen in (None, backend) else f"MUJOCO_GL={chosen} does not draw here: unset it"
            return Finding("rendering", True, f"{backend} draws a 32x32 image in {result:.1f} ms", advice)
        reasons.append(f"{backend}: {result}")
    return Finding(
        "rendering", None, "; ".join(reasons), "run `apt-get install libegl1 libgl1-mesa-dri libosmesa6` (as root)"
    )


VULKAN_DRIVERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
LAVAPIPE, OLDEST_MESA = "lvp", (24, 3)  # Mesa's driver that draws on the CPU, and since when it does for ManiSkill


def mesa() -> str | None:
    """The version of Mesa's Vulkan drivers, where the system knows its packages as Debian does."""
    if shutil.which("dpkg-query") is None:
        return None
    command = ["dpkg-query", "-W", "-f=${Version}", "mesa-vulkan-drivers"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return child.stdout.strip() or None if child.returncode == 0 else None


def vulkan(folders: Sequence[str] = VULKAN_DRIVERS) -> Finding:
    """ManiSkill renders with Vulkan: a loader finds drivers by the manifests that they install."""
    drivers = sorted({file.name.split("_icd")[0] for folder in folders for file in Path(folder).glob("*.json")})
    missing = [
        package
        for package, found in (
            ("libvulkan1", ctypes.util.find_library("vulkan")),
            ("mesa-vulkan-drivers", drivers),
        )
        if not found
    ]
    if missing:
        kinds = ["loader" if package == "libvulkan1" else "driver" for package in missing]
        advice = "only ManiSkill's images need it: " + _install_vulkan(" ".join(missing))
        return Finding("vulkan", None, "no " + " and no ".join(kinds), advice)
    version = mesa() if LAVAPIPE in drivers else None
    detail = "drivers: " + ", ".join(drivers) + (f"; Mesa {version}" if version else "")
    if "nvidia" in drivers or "nvidia_layers" in drivers:
        return Finding("vulkan", True, detail)
    if LAVAPIPE not in drivers:
        advice = "they need a GPU of their own; without one ManiSkill draws with Mesa's lavapipe: "
        return Finding("vulkan", None, detail, advice + _install_vulkan("mesa-vulkan-drivers"))
    if version and _numbers(version) < OLDEST_MESA:
        advice = f"ManiSkill draws without a GPU since Mesa {'.'.join(map(str, OLDEST_MESA))}: "
        return Finding("vulkan", None, detail, advice + _install_vulkan("mesa-vulkan-drivers libvulkan1"))
    return Finding("vulkan", True, f"{detail}; without a GPU, lavapipe draws on the CPU")


def _install_vulkan(packages: str) -> str:
    return (
        f"run `apt-get install {packages}` (as root; on Debian 12 add `-t bookworm-backports`, because its own Mesa is "
        "too old to render without a GPU)"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Those that a version begins with: (25, 0, 7) of "25.0.7-2~bpo12+1"."""
    found = re.match(r"[\d.]*", version.partition(":")[2] or version)
    return tuple(int(part) for part in found[0].split(".") if part) if found else ()


def ffmpeg() -> Finding:
    """The ffmpeg libraries within PyAV, and whether they encode H.264."""
    try:
        av = importlib.import_module("av")
    except (ImportError, OSError) as error:
        return Finding("ffmpeg", False, reason(error), "run `pip install av`; its wheel brings the ffmpeg libraries")
    try:
        av.codec.Codec("libx264", "w")
    except ValueError:  # PyAV's UnknownCodecError is one.
        advice = "videos will be larger: install the wheel of PyAV (`pip install --only-binary av av`)"
        return Finding("ffmpeg", None, f"PyAV {av.__version__} without libx264", advice)
    return Finding("ffmpeg", True, f"PyAV {av.__version__} with libx264")


def disk(folder: str | Path = ".", needed_gb: float = 5.0) -> Finding:
    """The free space of the folder's file system, with advice below ``needed_gb`` gigabytes."""
    free = shutil.disk_usage(folder).free / GIGABYTE
    advice = "" if free >= needed_gb else f"keep {needed_gb:.0f} GB free for checkpoints, episodes and videos"
    return Finding("disk", True if not advice else None, f"{free:.1f} GB free in {Path(folder).resolve()}", advice)


def memory(needed_gb: float = 4.0) -> Finding:
    """The memory of the machine or of its container, with advice below ``needed_gb`` gigabytes."""
    try:
        import psutil
    except ImportError:
        return Finding("memory", False, "psutil, which tells it, is not installed", "run `pip install psutil`")
    total = psutil.virtual_memory().total / GIGABYTE
    limit = Path("/sys/fs/cgroup/memory.max")  # A container may be allowed less than the machine has.
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()) / GIGABYTE)
    advice = "" if total >= needed_gb else f"{needed_gb:.0f} GB is comfortable: lower batch, worlds and replay size"
    return Finding("memory", True if not advice else None, f"{total:.1f} GB", advice)


def cores() -> Finding:
    """The number of CPU cores that this process may use, and their architecture."""
    return Finding("cores", True, f"{usable_cores()} usable, {platform.machine()}")


def examine() -> list[Finding]:
    """The findings of all probes, in the order in which they are printed."""
    probes = (python, packages, torch, gpu, rendering, vulkan, ffmpeg, disk, memory, cores)
    return [probe() for probe in probes]


def report(findings: Sequence[Finding]) -> str:
    """One line for each finding, and under it what to do about it."""
    words = {True: "ok", None: "absent", False: "MISSING"}
    width = max(len(finding.name) for finding in findings)
    margin = " " * (width + 11)
    lines = []
    for finding in findings:
        head = f"{words[finding.ok]:<7}  {finding.name:<{width}}  "
        lines += textwrap.wrap(finding.detail, 110, initial_indent=head, subsequent_indent=margin)
        lines += textwrap.wrap(finding.advice, 110, initial_indent=margin + "> ", subsequent_indent=margin + "  ")
    required = [finding.name for finding in findings if finding.ok is False]
    lines.append("required and missing: " + ", ".join(required) if required else "nothing required is missing")
    return "\n".join(lines) + "\n"


def doctor() -> int:
    """The exit status: 0 if nothing that Burnish requires is missing."""
    findings = examine()
    sys.stdout.write(report(findings))
    return 1 if any(finding.ok is False for finding in findings) else 0
