"""A simulation of ManiSkill, made of our settings, and one world of it on the CPU as a Gymnasium environment.

The simulation is the bare one, below the wrappers of ``gymnasium.make``: they would count time, copy and check what is
counted, copied and checked by ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from torch import Tensor

from ...policies.core.errors import BurnishError, did_you_mean
from .maniskill import ManiSkillConfig, Observations, RewardMode
from .maniskill_speed import speed_up

# All that ManiSkill's constructors raise where a setting, a file or a driver is wrong.
_REFUSALS = (
    AssertionError, AttributeError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
LARGEST_SEED = (1 << 32) - 1  # NumPy's RandomState, of which ManiSkill is made, takes no larger one


def simulate(config: ManiSkillConfig, num_envs: int = 1, gpu: bool = False) -> Any:
    """ManiSkill's own environment of ``num_envs`` worlds."""
    spec = _registered(config.id)
    renderer = ("gpu" if gpu else "cpu") if config.renders else "none"
    drawn: dict[str, Any] = {"width": config.image_size, "height": config.image_size}
    shaded = {} if config.shader is None else {"shader_pack": config.shader}
    settings: dict[str, Any] = {
        "num_envs": num_envs,
        "obs_mode": config.obs.value,
        "reward_mode": config.reward_mode.value,
        "control_mode": config.control_mode or config.task.control_mode,
        "render_mode": "rgb_array" if config.film else None,
        "sim_backend": "physx_cuda" if gpu else "physx_cpu",
        "render_backend": renderer,
        "sensor_configs": {**drawn, **shaded},
        "human_render_camera_configs": dict(shaded),
    }
    if config.robot_uids is not None:
        settings["robot_uids"] = config.robot_uids
    if config.control_hz is not None:
        settings["sim_config"] = {"control_freq": config.control_hz}
    try:
        simulation = spec.cls(**{**spec.default_kwargs, **settings})
    except _REFUSALS as error:
        raise BurnishError(_cannot(config, error, renderer)) from error
    _check_reward(config, simulation)
    if config.obs is Observations.rgb:
        _choose_cameras(config, simulation)
    return simulation


def registered_limit(config: ManiSkillConfig) -> int | None:
    """The greatest number of steps of an episode as ManiSkill registers it, None without one."""
    return _registered(config.id).max_episode_steps


def _registered(name: str) -> Any:
    try:
        importlib.import_module("mani_skill.envs")  # registers all tasks
        registration = importlib.import_module("mani_skill.utils.registration")
        assets = importlib.import_module("mani_skill.utils.assets")
    except (ImportError, OSError) as error:
        raise BurnishError(f"ManiSkill cannot be imported ({error}); run `pip install burnish[maniskill]`") from error
    if name not in registration.REGISTERED_ENVS:
        raise BurnishError(f"ManiSkill has no task {name!r}; {did_you_mean(name, registration.REGISTERED_ENVS)}")
    spec = registration.REGISTERED_ENVS[name]
    # ManiSkill itself would ask a question on the terminal, and end the process unless the answer is yes.
    missing = [asset for asset in spec.asset_download_ids or () if not _is_there(assets, asset)]
    if missing:
        raise BurnishError(
            f"env.id={name} needs files that are not here: {', '.join(missing)}; run `python -m "
            f"mani_skill.utils.download_asset {name}`"
        )
    return spec


def _is_there(assets: Any, asset: str) -> bool:
    sources = [asset]
    if asset in assets.DATA_GROUPS:
        sources = assets.expand_data_group_into_individual_data_source_ids(asset)
    return all(assets.is_data_source_downloaded(source) for source in sources)


def _cannot(config: ManiSkillConfig, error: Exception, renderer: str) -> str:
    told = str(error).strip().rstrip(".") or type(error).__name__
    if "supported modes" in told:
        return f"env.control_mode={config.control_mode} is not one of the robot of {config.id}: {told}"
    if "reward mode" in told:
        return f"env.id={config.id} has no reward {config.reward_mode.value}: {told}; choose another env.reward_mode"
    if "divisible" in told:
        return f"env.control_hz={config.control_hz} does not fit the steps of the simulation: {told}"
    if "registered agents" in told:
        return f"env.robot_uids={config.robot_uids} is not a robot of ManiSkill: {told}"
    if "render" in told.lower() or "vulkan" in told.lower():
        if renderer == "none":
            return f"env.id={config.id} cannot be simulated without a renderer ({told}); set env.film=true"
        return f"ManiSkill cannot draw here ({told}); `burnish doctor` says what Vulkan lacks"
    return f"env.id={config.id} cannot be made ({type(error).__name__}: {told}); correct its settings"


def _check_reward(config: ManiSkillConfig, simulation: Any) -> None:
    """A task without the reward would refuse only when it is stepped."""
    info = simulation.get_info()
    if config.reward_mode is RewardMode.sparse and "fail" in info and "success" not in info:
        raise BurnishError(f"env.id={config.id} has no reward sparse that works; set env.reward_mode=dense")
    if config.reward_mode is RewardMode.sparse:
        return
    base = importlib.import_module("mani_skill.envs.sapien_env").BaseEnv
    name = f"compute_{config.reward_mode.value}_reward"
    if getattr(type(simulation), name) is getattr(base, name):
        raise BurnishError(
            f"env.id={config.id} has no reward {config.reward_mode.value}; choose another env.reward_mode"
        )


def _choose_cameras(config: ManiSkillConfig, simulation: Any) -> None:
    """Cameras that are not observed are taken out, again whenever the task builds its scene anew."""
    known = list(simulation._sensors)
    for name in config.cameras:
        if name not in known:
            raise BurnishError(f"env.id={config.id} has no camera {name!r}; {did_you_mean(name, known)}")
    idle = set(known) - set(config.cameras or known)
    set_up = simulation._setup_sensors

    def remove() -> None:
        for name in idle:
            del simulation._sensors[name]

    def set_up_those(options: dict[str, Any]) -> None:
        set_up(options)
        remove()

    if idle:
        simulation._setup_sensors = set_up_those
        remove()


def begin(simulation: Any, seed: int, rebuild: bool = False) -> Any:
    """The first observation of the only world of a simulation. Contacts are those of the last step of physics, so that
    after an episode that ended with a cube in the hand ManiSkill would show ``is_grasped`` in the next one. One step,
    of which nothing else is kept, puts an end to that; a new scene has no contacts."""
    options = {"reconfigure": rebuild}
    if not rebuild and simulation.reconfiguration_freq == 0:
        simulation.reset(seed=seed, options=options)
        simulation.scene.step()
    return simulation.reset(seed=seed, options=options)[0]


def read(config: ManiSkillConfig, seen: Any) -> dict[str, Tensor]:
    """An observation of ManiSkill as ``state`` (N, D) float32, and (N, H, W, 3) uint8 for each camera."""
    if config.obs is Observations.state:
        return {"state": seen}
    flat = [x for part in ("agent", "extra") for x in _numbers(seen[part])]
    return {"state": torch.cat(flat, 1), **{name: data["rgb"] for name, data in seen["sensor_data"].items()}}


def _numbers(part: Mapping[str, Any]) -> list[Tensor]:
    """Each (N, ...) as (N, d) float32, in ManiSkill's order."""
    found: list[Tensor] = []
    for value in part.values():
        found += _numbers(value) if isinstance(value, Mapping) else [value.float().reshape(len(value), -1)]
    return found


def box_of(config: ManiSkillConfig, simulation: Any) -> spaces.Box:
    """The action space of one world; one that is no bounded box is refused."""
    space = simulation.single_action_space
    if not isinstance(space, spaces.Box):
        raise BurnishError(
            f"env.id={config.id} takes actions of kind {type(space).__name__}, as tasks of several robots do, but "
            "policies here act in one vector; choose a task of one robot"
        )
    if not space.is_bounded("both"):
        raise BurnishError(
            f"env.control_mode={simulation.control_mode} of {config.id} takes actions without limits, but policies "
            "here act between limits; choose one of "
            + ", ".join(mode for mode in simulation.agent.supported_control_modes if "delta" in mode)
        )
    return space


class ManiSkillWorld(gymnasium.Env[Any, np.ndarray]):
    """Observations are a dict: ``state``, and each camera under its name.

    Equal seeds and actions give equal episodes, bit for bit, until the robot touches something: then a little of the
    episodes before is left in the physics, unless each episode has a new scene (``rebuild``). Replays of one episode of
    PushCube differed by up to 0.06 after the first touch. An episode is saved as its seed and its actions, and one
    that leads elsewhere is given up. What ManiSkill calls the state of a world is no help: 20 steps after it was
    restored numbers differ by up to 3e-4, in each mode that was tried.
    """

    def __init__(self, config: ManiSkillConfig) -> None:
        self.config = config
        registered = registered_limit(config)
        self.limit, self.notes = config.limit(registered), [config.about_limit(registered)]
        speed_up()
        self.simulation = simulate(config)
        self.action_space = box_of(config, self.simulation)
        self.action_mode = str(self.simulation.control_mode)
        self.control_hz = float(self.simulation.control_freq)
        self.dt = 1 / self.control_hz
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": self.control_hz}
        self.render_mode = "rgb_array" if config.film else None
        self.spec = EnvSpec(config.id, max_episode_steps=self.limit)
        first = self._observe(self.simulation.get_obs())
        self.observation_space = spaces.Dict({name: _space(x) for name, x in first.items()})
        if config.obs is Observations.rgb and "hand_camera" in first and config.robot_uids is None:
            self.notes.append(
                f"{config.id}: its robot carries a camera, which takes long to draw; env.robot_uids=panda has none"
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None:  # without a seed ManiSkill would draw from torch's generator, which belongs to the learner
            seed = int(self.np_random.integers(1 << 31))
        if not 0 <= seed <= LARGEST_SEED:
            raise BurnishError(f"a seed of ManiSkill must lie in [0, 2^32), but it is {seed}; fold it first")
        with torch.no_grad():
            seen = begin(self.simulation, seed, self.config.rebuild)
        return self._observe(seen), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        with torch.no_grad():
            seen, reward, _, _, info = self.simulation.step(action)
        success, fail = (bool(info[name]) if name in info else None for name in ("success", "fail"))
        ended = bool(fail) or (self.config.end_at_success and bool(success))
        return self._observe(seen), float(reward), ended, False, {} if success is None else {"success": success}

    def render(self) -> np.ndarray:  # type: ignore[override]
        if not self.config.film:
            raise BurnishError(f"{self.config.id} was made without pictures for films; set env.film=true")
        return self.simulation.render()[0].numpy()

    def close(self) -> None:
        self.simulation.close()

    def _observe(self, seen: Any) -> dict[str, np.ndarray]:
        return {name: x[0].numpy() for name, x in read(self.config, seen).items()}


def _space(x: np.ndarray) -> spaces.Box:
    if x.dtype == np.uint8:
        return spaces.Box(0, 255, x.shape, np.uint8)
    return spaces.Box(-np.inf, np.inf, x.shape, np.float32)
