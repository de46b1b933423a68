"""Pictures of N worlds, drawn by MuJoCo's own renderer.

On a CPU shadows, reflections and multisampling cost 7 to 30 times what the rest does, and the triangles of round things
most of that rest: MuJoCo builds a sphere of a thousand, whose size in a small picture is a few pixels. So pictures are
*plain* unless they are asked to be *lavish*. The two look different to a network: what it was trained on must be what
it sees (`EnvSpec.pixels`).

A picture is a function of the world's state at this instant and of its own model: poses are derived from the state
once more on the side, because those that a step leaves behind are one physics step old, and those of a restored world
are not there at all. Each thread of the physics has a context and its share of the worlds; which of them draws a world
changes no bit of its picture.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np

from ..policies.core.errors import BurnishError, did_you_mean
from .gl import open_context
from .physics import Physics, Rows
from .task import PixelConfig

FANCY = ("SHADOW", "REFLECTION", "SKYBOX", "FOG", "HAZE")
FACET = 7  # pixels of the picture's width for each facet of a round thing, in plain pictures
SHARE = 4  # worlds that are worth a thread and a context of their own
FREE = ""  # the name of the view from no camera of the model, which shows all of it


class Pixels:
    """``draw`` gives a picture of each camera and world. Contexts are opened by the first call."""

    def __init__(self, physics: Physics, config: PixelConfig) -> None:
        names = [physics.model.camera(i).name for i in range(physics.model.ncam)]
        for name in config.cameras:
            if name not in names and name != FREE:
                raise BurnishError(f"the world has no camera {name!r}; {did_you_mean(name, names)}")
        if not config.cameras or config.size < 1:
            raise BurnishError("pictures need at least one camera and a size above 0")
        self.size = config.size
        self.keys = [f"image.{name}" for name in config.cameras]
        self.shapes = dict.fromkeys(self.keys, (3, config.size, config.size))
        self._physics, self._config = physics, config
        self._out = {key: np.zeros((physics.num_worlds, *s), np.uint8) for key, s in self.shapes.items()}
        self._painters: list[_Painter] = []

    def draw(self, rows: Rows | None) -> dict[str, np.ndarray]:
        """Camera -> (N, 3, H, W) uint8, in the same memory each time; worlds outside ``rows`` keep their last one."""
        rows = np.arange(self._physics.num_worlds) if rows is None else rows
        if len(rows) == 0:
            return self._out
        if not self._painters:
            # A context takes as long to open as hundreds of pictures to draw.
            weakref.finalize(self, _close, self._painters).atexit = False
            try:
                for _ in range(min(self._physics.threads, -(-self._physics.num_worlds // SHARE))):
                    self._painters.append(_Painter(self._physics.model, self._config))
            except BaseException:
                _close(self._painters)
                self._painters.clear()
                raise
        shares = [x.tolist() for x in np.array_split(rows, len(self._painters)) if len(x)]
        out = [self._out[key] for key in self.keys]
        work = [
            painter.thread.submit(painter.paint, self._physics, share, out)
            for painter, share in zip(self._painters, shares, strict=False)
        ]
        for share in work:
            share.result()
        return self._out


def film_camera(model: mujoco.MjModel) -> str:
    """The camera called front, else the model's first, else the view from no camera."""
    names = [model.camera(i).name for i in range(model.ncam)]
    return "front" if "front" in names else next(iter(names), FREE)


def _close(painters: Sequence[_Painter]) -> None:
    for painter in painters:
        # Not waited for: the collector of garbage may run in any thread, this painter's too.
        with contextlib.suppress(RuntimeError):  # no thread takes work any more when the program ends
            painter.thread.submit(painter.free)
        painter.thread.shutdown(wait=False)


class _Painter:
    """A context and the thread in which it is current, for good: contexts cannot be in two."""

    def __init__(self, model: mujoco.MjModel, config: PixelConfig) -> None:
        self.thread = ThreadPoolExecutor(1, "pixels")
        self._config = config
        try:
            self.thread.submit(self._open, model).result()
        except BaseException:
            self.thread.shutdown()
            raise

    def _open(self, model: mujoco.MjModel) -> None:
        size = self._config.size
        own = copy.copy(model)  # The physics' model stays as it is.
        quality = own.vis.quality
        own.vis.global_.offwidth = own.vis.global_.offheight = size
        if not self._config.lavish:
            own.light_castshadow[:] = 0
            own.mat_reflectance[:] = 0
            quality.offsamples = 0
            quality.numslices = min(quality.numslices, max(8, size // FACET))
            quality.numstacks = min(quality.numstacks, max(4, size // FACET // 2))
            quality.numquads = 1
        self._gl, self._context = open_context(own, size)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(own, maxgeom=1000 + own.ngeom + own.nsite)
        if not self._config.lavish:
            for name in FANCY:
                self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0
        self._data = mujoco.MjData(own)
        self._option = mujoco.MjvOption()
        self._views = [_view(own, name) for name in self._config.cameras]
        self._frame = mujoco.MjrRect(0, 0, size, size)
        self._picture = np.empty((size, size, 3), np.uint8)

    def paint(self, physics: Physics, worlds: Sequence[int], out: Sequence[np.ndarray]) -> None:
        data, scene, everything = self._data, self._scene, int(mujoco.mjtCatBit.mjCAT_ALL)
        # OpenGL counts rows from below.
        upright = self._picture[::-1].transpose(2, 0, 1)
        for i in worlds:
            model = physics.models[i]
            self._pose(model, physics.data[i])
            for view, pictures in zip(self._views, out, strict=True):
                mujoco.mjv_updateScene(model, data, self._option, None, view, everything, scene)
                mujoco.mjr_render(self._frame, scene, self._context)
                mujoco.mjr_readPixels(self._picture, None, self._frame, self._context)
                pictures[i] = upright

    def _pose(self, model: mujoco.MjModel, world: mujoco.MjData) -> None:
        """Where everything is, from the state alone; what belongs to ``world`` is not written."""
        data = self._data
        data.qpos[:] = world.qpos
        if model.nmocap:
            data.mocap_pos[:] = world.mocap_pos
            data.mocap_quat[:] = world.mocap_quat
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
        if model.nflex:
            mujoco.mj_flex(model, data)
        if model.ntendon:
            mujoco.mj_tendon(model, data)

    def free(self) -> None:
        self._context.free()
        self._gl.free()


def _view(model: mujoco.MjModel, name: str) -> mujoco.MjvCamera:
    view = mujoco.MjvCamera()
    if name == FREE:
        mujoco.mjv_defaultFreeCamera(model, view)
    else:
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(name).id
    return view
