"""Which OpenGL draws: EGL, OSMesa or GLFW, the first that really gives a context, or the one that MUJOCO_GL names.

MuJoCo itself decides when it is imported, and without MUJOCO_GL for GLFW, which needs a screen. Here the choice is made
when the first picture is drawn, so pictures need no setting at all.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import threading
import weakref
from typing import Protocol

import mujoco

from ..policies.core.errors import BurnishError

BACKENDS = ("egl", "osmesa", "glfw")
OFF = ("off", "0", "false", "disable", "disabled")  # how MuJoCo is told to do without OpenGL

# A driver is asked by a child first. One that fails leaves libraries behind with which the next one does not work, and
# one that crashes takes its process along. That is 0.3 s, once per process.
_ASK = """
import importlib, sys, mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(8, 8)
context.make_current()
model = mujoco.MjModel.from_xml_string("<mujoco/>")
mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100).free()
context.free()
"""


class GLContext(Protocol):
    """The interface of an OpenGL context."""

    def make_current(self) -> None: ...

    def free(self) -> None: ...


_lock = threading.Lock()  # drivers are not made for being loaded by two threads at once
_chosen: list[str] = []  # the backend of this process, once it is known
_open: weakref.WeakSet[GLContext] = weakref.WeakSet()


def open_context(model: mujoco.MjModel, size: int) -> tuple[GLContext, mujoco.MjrContext]:
    """A context, current in the calling thread, and in it what MuJoCo needs to draw ``model`` off the screen. Both
    are freed in the same thread, the second one first."""
    # Mesa's own threads would only be in the way of ours, of which each draws other worlds.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    with _lock:
        if not _chosen:
            _chosen.append(choose())
        context: GLContext = importlib.import_module(f"mujoco.{_chosen[0]}").GLContext(size, size)
        _open.add(context)
        # Always the last to be registered, so it comes before the end of the driver itself.
        atexit.unregister(_free_all)
        atexit.register(_free_all)
        context.make_current()
        try:
            return context, mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        except mujoco.FatalError as error:
            context.free()
            raise BurnishError(
                f"OpenGL ({_chosen[0]}) cannot draw pictures of {size} x {size} pixels ({error}); see `burnish doctor`"
            ) from error


def choose() -> str:
    """The first backend of OpenGL that gives a context here; MUJOCO_GL leaves no choice where it names one."""
    wish = os.environ.get("MUJOCO_GL", "").lower()
    if wish in OFF:
        raise BurnishError(f"MUJOCO_GL={wish} forbids to draw pictures; unset it, or observe the state alone")
    candidates = [wish] if wish in BACKENDS else [x for x in BACKENDS if x != "glfw" or has_screen()]
    reasons = {}
    for backend in candidates:
        reasons[backend] = _complaint(backend)
        if reasons[backend] is None:
            return backend
    raise BurnishError(
        f"no OpenGL can draw pictures here ({'; '.join(f'{name}: {why}' for name, why in reasons.items())}); run "
        "`apt-get install libegl1 libgl1-mesa-dri libosmesa6` as root, and see `burnish doctor`"
    )


def has_screen() -> bool:
    """Whether this process could open a window."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _complaint(backend: str) -> str | None:
    """None if the backend gives a context."""
    try:
        command = [sys.executable, "-c", _ASK, backend]
        child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "no context after 60 s"
    if child.returncode == 0:
        return None
    # The sentence of the exception; what is printed after it are complaints of the interpreter as it ends.
    messages = [line for line in child.stderr.splitlines() if line[:1].isalpha() and ": " in line]
    return messages[0].rstrip(".") if messages else f"the process ended with status {child.returncode}"


def _free_all() -> None:
    for context in list(_open):
        context.free()
