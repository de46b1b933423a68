"""The worlds of the environments that `burnish worlds add` makes: ``env=remote env.name=robosuite env.id=Lift``.

It runs there, beside `world_server.py`, with NumPy and what the recipe installs: so it is written for Python 3.8 and
imports nothing of ours. A maker takes ``env.id``, the limit of time and ``env.kwargs``, and returns an environment.

`python side_worlds.py MAKER` shows that a new environment works, and says in one line what it did.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np

LIMIT = 500  # steps of an episode of robosuite, which names no limit that is meant for learning
MESHES = (
    "the meshes of LIBERO are not in its wheel, and huggingface.co, from where it downloads them, was not reached; put "
    "the folder lerobot/libero-assets into ~/.cache/libero/assets"
)


class Robosuite:
    """A world of robosuite, or of LIBERO, which is made of these, as Gymnasium wants it.

    The GymWrapper of robosuite reports the end of time as a termination and success not at all, and its seed does not
    reach the generator that places the objects.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}  # which gymnasium.vector reads

    def __init__(self, world: Any, limit: int, render_mode: str | None) -> None:
        from gymnasium import spaces

        self.world, self.render_mode = world, render_mode
        self.keys = [f"robot{i}_proprio-state" for i in range(len(world.robots))]
        self.keys += ["object-state"] if world.use_object_obs else []
        self.keys += [f"{name}_image" for name in world.camera_names] if world.use_camera_obs else []
        self.spec, self.control_freq = SimpleNamespace(max_episode_steps=limit), world.control_freq
        first = self._see(world.reset())
        ends = {True: (0, 255, np.uint8), False: (-np.inf, np.inf, np.float64)}  # of a picture, of numbers
        boxes: dict[str, Any] = {}
        for key, x in first.items():
            low, high, kind = ends[x.dtype == np.uint8]
            boxes[key] = spaces.Box(low, high, x.shape, kind)
        self.observation_space = spaces.Dict(boxes)
        low, high = world.action_spec
        self.action_space = spaces.Box(low, high, dtype=np.float64)

    @property
    def unwrapped(self) -> Any:
        return self.world

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            np.random.seed(seed)  # from which older ones draw
        rng = getattr(self.world, "rng", None)  # of robosuite 1.5
        if seed is not None and rng is not None:
            rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        return self._see(self.world.reset()), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        obs, reward, _, info = self.world.step(action)
        return self._see(obs), reward, False, False, {**info, "success": bool(self.world._check_success())}

    def render(self) -> Any:
        return self.world.sim.render(camera_name=self.world.render_camera, height=256, width=256)[::-1]

    def close(self) -> None:
        self.world.close()

    def _see(self, obs: dict[str, Any]) -> dict[str, Any]:
        """Pictures stand upside down there."""
        seen = {key: np.asarray(obs[key]) for key in self.keys}
        return {key: x[::-1] if x.ndim == 3 else np.ravel(x) for key, x in seen.items()}


def robosuite(id: str, max_steps: int | None = None, render_mode: str | None = None, **kwargs: Any) -> Robosuite:
    """``id`` is a task such as Lift or Stack. Pictures: ``use_camera_obs`` and ``camera_names``."""
    quiet()
    import robosuite as suite

    world = suite.make(id, **chosen({"robots": "Panda"}, render_mode, kwargs))
    return Robosuite(world, max_steps or LIMIT, render_mode)


def libero(id: str, max_steps: int | None = None, render_mode: str | None = None, **kwargs: Any) -> Robosuite:
    """``id`` is SUITE/TASK, such as libero_goal/put_the_bowl_on_the_plate: a file of tasks that the package brings."""
    tasks, problems = libero_tasks()
    import robosuite as suite
    from libero.libero import get_assets_path  # pyright: ignore[reportMissingImports]
    from libero.libero.envs import bddl_utils  # pyright: ignore[reportMissingImports]

    if id not in tasks:
        near = difflib.get_close_matches(id, tasks, n=1, cutoff=0) or [""]
        raise ValueError(f"LIBERO has no task {id}; the nearest is {near[0]}")
    if not os.path.isdir(os.path.join(get_assets_path(), "scenes")):
        raise FileNotFoundError(MESHES)
    controller = suite.load_controller_config(default_controller="OSC_POSE")  # pyright: ignore[reportAttributeAccessIssue]
    usual = {"robots": ["Panda"], "controller_configs": controller}
    problem = problems[bddl_utils.get_problem_info(tasks[id])["problem_name"]]
    return Robosuite(problem(tasks[id], **chosen(usual, render_mode, kwargs)), max_steps or LIMIT, render_mode)


def libero_tasks() -> tuple[dict[str, str], dict[str, Any]]:
    """SUITE/TASK -> the file that says what it is, and the classes that such files name."""
    quiet()
    # On its first import LIBERO asks where its data are, and remembers the answer in this folder.
    os.environ.setdefault("LIBERO_CONFIG_PATH", os.path.join(sys.prefix, "libero"))
    with mock.patch("builtins.input", return_value="n"):
        from libero.libero import get_default_path_dict  # pyright: ignore[reportMissingImports]
    from libero.libero.envs import TASK_MAPPING  # pyright: ignore[reportMissingImports]

    folder = os.path.abspath(get_default_path_dict()["bddl_files"])
    files = sorted(glob.glob(os.path.join(folder, "*", "*.bddl")))
    return {os.path.relpath(path, folder)[: -len(".bddl")]: path for path in files}, TASK_MAPPING


def chosen(usual: dict[str, Any], render_mode: str | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a robosuite world: no pictures where none are wanted, and episodes that Burnish ends."""
    found = {"use_camera_obs": False, "has_renderer": False, "control_freq": 20, **usual, **kwargs, "ignore_done": True}
    found.setdefault("has_offscreen_renderer", found["use_camera_obs"] or render_mode is not None)
    return found


def quiet() -> None:
    """robosuite tells in every reset from where it loads the settings of its controllers."""
    logging.getLogger("robosuite_logs").addFilter(lambda record: record.levelno >= logging.ERROR)


def maniskill(id: str, max_steps: int | None = None, **kwargs: Any) -> Any:
    """One world of ManiSkill on the CPU, as its planner plays it. Its plans are longer than the limit of time that is
    registered, so an episode here lasts four times as long."""
    import gymnasium
    import mani_skill.envs  # noqa: F401
    from mani_skill.utils.registration import REGISTERED_ENVS
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    usual = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "none", **kwargs}
    limit = max_steps or 4 * (REGISTERED_ENVS[id].max_episode_steps or LIMIT)

    class World(CPUGymWrapper):
        spec: Any = SimpleNamespace(max_episode_steps=limit)

    return World(gymnasium.make(id, num_envs=1, max_episode_steps=limit, **usual))


# ---- What shows that a new environment works ----


def play(world: Any, steps: int = 20) -> str:
    """Two episodes on one seed, which must be the same."""
    ends, began = [], 0.0
    for _ in range(2):
        world.reset(seed=0)
        rng, began = np.random.default_rng(0), time.perf_counter()
        for _ in range(steps):
            obs = world.step(rng.uniform(-1, 1, world.action_space.shape).astype(np.float32))[0]
        ends.append(np.concatenate([np.ravel(x) for x in obs.values()] if isinstance(obs, dict) else [obs]))
    if not np.array_equal(*ends):
        raise AssertionError("one seed gave two episodes")
    return f"{steps / (time.perf_counter() - began):.0f} steps/s"


def probe_robosuite() -> str:
    """One line on a short episode of robosuite's Lift, played as a probe."""
    return f"Lift plays, {play(robosuite('Lift'))}"


def probe_libero() -> str:
    """One line on LIBERO: its number of tasks, and a short episode of the first."""
    tasks, problems = libero_tasks()
    said = f"{len(tasks)} tasks of {len(problems)} kinds"
    try:
        world = libero(next(iter(tasks)))
    except FileNotFoundError as error:
        return f"{said}, none of which can be played yet: {error}"
    return f"{said}; the first one plays, {play(world)}"


def probe_maniskill() -> str:
    """One line on ManiSkill: a short episode, and two demonstrations solved by its planner."""
    import gymnasium
    from mani_skill.examples.motionplanning.panda import solutions

    usual: dict[str, Any] = {"obs_mode": "none", "sim_backend": "physx_cpu", "render_backend": "none"}
    solvers: Any = {"PushCube-v1": solutions.solvePushCube, "PickCube-v1": solutions.solvePickCube}
    said = [f"PickCube-v1 plays, {play(maniskill('PickCube-v1'))}"]
    for name, solve in solvers.items():
        world = gymnasium.make(name, control_mode="pd_joint_pos", max_episode_steps=1000, **usual)
        found = solve(world, seed=0, debug=False, vis=False)
        if found == -1 or not bool(found[-1]["success"]):
            raise AssertionError(f"the planner failed at {name}")
        said.append(f"the planner solves {name} in {int(found[-1]['elapsed_steps'])} steps")
    return ", ".join(said)


PROBES = {"robosuite": probe_robosuite, "libero": probe_libero, "maniskill": probe_maniskill}

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # its files are no packages of theirs
    sys.stdout.write(PROBES[sys.argv[1]]() + "\n")
