"""ManiSkill: one world on the CPU against the bare environment, the batch against one world and a stand-in."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from burnish.policies.core.config import from_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.wrapper import continues
from burnish.sim.external import maniskill_speed
from burnish.sim.external.maniskill import TASKS, Backend, ManiSkillConfig, Observations, RewardMode, hosted, make
from burnish.sim.external.maniskill_gpu import ManiSkillEnv
from burnish.sim.external.settings import GymConfig, Reward
from burnish.sim.external.worlds import ExternalEnv


@pytest.fixture
def sapien(require):
    """Whatever needs the real thing asks for this."""
    return require("mani_skill.envs")


def random_actions(count: int, size: int = 7) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, size)).astype(np.float32)


def play(world: Any, seed: int, actions: np.ndarray) -> list[np.ndarray]:
    """All numbers of an episode."""
    rows = [world.reset(seed=seed)[0]["state"]]
    for action in actions:
        obs, reward, terminated, truncated, _ = world.step(action)
        rows.append(np.concatenate([obs["state"], [reward, terminated, truncated]]))
    return rows


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


# ---- one world on the CPU ----


@pytest.mark.maniskill
def test_a_world_is_a_gymnasium_environment_without_a_limit_of_time(sapien):
    world = make(id="PushCube-v1")
    assert world.spec is not None and world.spec.max_episode_steps == TASKS["PushCube-v1"].max_steps == world.limit
    obs, _ = world.reset(seed=0)
    assert world.observation_space.contains(obs) and set(obs) == {"state"} and obs["state"].dtype == np.float32
    assert world.action_space == spaces.Box(-1, 1, (7,)) and world.action_mode == "pd_ee_delta_pose"
    assert world.dt == 1 / 20
    for _ in range(52):  # it is registered with 50
        obs, reward, terminated, truncated, info = world.step(np.zeros(7, np.float32))
    assert world.observation_space.contains(obs) and info == {"success": False}
    assert type(reward) is float and terminated is False and truncated is False


@pytest.mark.maniskill
def test_equal_seeds_give_equal_episodes_and_others_do_not(sapien):
    world, other, actions = make(id="PickCube-v1"), make(id="PickCube-v1"), random_actions(30)
    first = play(world, 5, actions)
    assert not equal(first, play(world, 6, actions))
    assert equal(first, play(world, 5, actions)) and equal(first, play(other, 5, actions))
    with pytest.raises(BurnishError, match="2\\^32"):
        world.reset(seed=1 << 32)


@pytest.mark.maniskill
def test_episodes_without_a_seed_leave_the_generator_of_torch_alone(sapien):
    world = make(id="PushCube-v1")
    starts = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.random.get_rng_state()
        world.reset(seed=1)
        starts.append(world.reset()[0]["state"])
        assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(*starts)
    assert not np.array_equal(starts[0], world.reset()[0]["state"])


@pytest.mark.maniskill
@pytest.mark.parametrize(
    ("name", "mode", "reward"),
    [
        ("PushCube-v1", "pd_ee_delta_pose", "normalized_dense"),
        ("PickCube-v1", "pd_joint_delta_pos", "dense"),
        ("PushCube-v1", "pd_ee_target_delta_pos", "sparse"),
    ],
)
def test_a_world_is_the_bare_environment_bit_for_bit(sapien, name: str, mode: str, reward: str):
    """Which is played as it was installed, without what makes it quicker."""
    import gymnasium

    world = make(id=name, control_mode=mode, reward_mode=reward)
    actions = random_actions(60, world.action_space.shape[0])
    actions[:25, 2] = -1  # into the table
    quick = play(world, 3, actions)
    try:
        maniskill_speed.undo()
        bare = gymnasium.make(
            name, obs_mode="state", control_mode=mode, reward_mode=reward, sim_backend="physx_cpu",
            render_backend="none", max_episode_steps=1000,
        )  # fmt: skip
        rows = [bare.reset(seed=3)[0][0].numpy()]
        for action in actions:
            obs, paid, terminated, truncated, _ = bare.step(action)
            rows.append(np.concatenate([obs[0].numpy(), [float(paid), bool(terminated), bool(truncated)]]))
    finally:
        assert maniskill_speed.speed_up()
    assert equal(quick, rows)


def push(state: np.ndarray) -> np.ndarray:
    """Behind the cube, down, and towards the goal."""
    tool, goal, cube = state[18:21], state[25:28], state[28:31]
    behind = np.array([cube[0] - 0.12, cube[1], tool[2]])
    if tool[2] > 0.04:
        target = behind if np.abs(tool - behind).max() > 0.02 else np.array([*behind[:2], 0.02])
    else:
        target = np.array([goal[0], cube[1], 0.02])
    action = np.zeros(7, np.float32)
    action[:3], action[6] = np.clip((target - tool) / 0.1, -1, 1), -1
    return action


@pytest.mark.maniskill
@pytest.mark.parametrize("end", [True, False])
def test_success_is_told_and_ends_the_episode_if_it_should(sapien, end: bool):
    world = make(id="PushCube-v1", end_at_success=end)
    obs, _ = world.reset(seed=0)
    for _ in range(world.limit):
        obs, reward, terminated, _, info = world.step(push(obs["state"]))
        if info["success"]:
            break
    assert info["success"] is True and reward == 1.0 and terminated is end


def grasp(state: np.ndarray, tick: int) -> np.ndarray:
    """Above the cube of PickCube, down, close, and to the goal."""
    tool, goal, cube = state[19:22], state[26:29], state[29:32]
    target = goal if tick >= 55 else tool if tick >= 45 else np.array([*cube[:2], 0.02 if tick >= 20 else 0.12])
    action = np.zeros(7, np.float32)
    action[:3], action[6] = np.clip((target - tool) / 0.1, -1, 1), 1 if tick < 45 else -1
    return action


@pytest.mark.maniskill
def test_nothing_is_left_of_an_episode_that_ended_in_a_grasp(sapien):
    """Not even in the first observation, where ManiSkill itself would still show the grasp. The second way goes by what
    ManiSkill computes without what makes it quicker: there is a grasp to be found this time."""
    world, episodes = make(id="PickCube-v1"), []
    for quick in (True, True, False):
        if not quick:
            maniskill_speed.undo()
        rows = [world.reset(seed=0)[0]["state"]]
        for tick in range(90):
            obs, _, _, _, info = world.step(grasp(rows[-1], tick))
            rows.append(obs["state"])
        assert maniskill_speed.speed_up()
        assert rows[0][18] == 0 and rows[70][18] == 1 and info["success"]
        episodes.append(rows)
    assert equal(episodes[0], episodes[1]) and equal(episodes[0], episodes[2])


@pytest.mark.maniskill
@pytest.mark.slow
def test_images_of_the_cameras_that_were_asked_for(sapien):
    """PegInsertionSide builds its scene anew in each episode, and must not bring back cameras that were left out."""
    world = make(id="PegInsertionSide-v1", obs="rgb", image_size=16, threads=1)
    obs, _ = world.reset(seed=0)
    assert set(obs) == {"state", "base_camera", "hand_camera"} and world.observation_space.contains(obs)
    assert obs["base_camera"].shape == (16, 16, 3) and obs["base_camera"].dtype == np.uint8
    assert obs["base_camera"].std() > 1 and not np.array_equal(obs["base_camera"], obs["hand_camera"])
    assert len(obs["state"]) == 25  # joints, their speeds and the tool: neither peg nor hole
    env = ManiSkillEnv(1, ManiSkillConfig("PegInsertionSide-v1", Observations.rgb, ["hand_camera"], 16))
    seen = env.reset(seeds=[0])
    assert env.spec.obs.shapes == {"state": (25,), "image.hand_camera": (3, 16, 16)}
    assert np.array_equal(seen["image.hand_camera"][0].permute(1, 2, 0).numpy(), obs["hand_camera"])


@pytest.mark.maniskill
def test_limits_that_fit_the_demonstrations_are_longer_than_registered(sapien):
    from mani_skill.utils.registration import REGISTERED_ENVS

    for name, task in TASKS.items():
        registered = REGISTERED_ENVS[name].max_episode_steps or 0
        assert task.max_steps is None or task.max_steps > registered
        assert str(registered) in ManiSkillConfig(name).about_limit(registered) or task.max_steps is None
    unknown = ManiSkillConfig("PlugCharger-v1")
    assert unknown.limit(200) == 200 and "as registered" in unknown.about_limit(200)
    assert ManiSkillConfig(max_steps=7).limit(50) == 7
    with pytest.raises(BurnishError, match=r"env\.max_steps"):
        unknown.limit(None)


@pytest.mark.maniskill
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"id": "PushCube"}, "did you mean 'PushCube-v1'"),
        ({"control_mode": "pd_nothing"}, "is not one of the robot.*pd_joint_delta_pos"),
        ({"control_hz": 7}, r"env\.control_hz=7 does not fit"),
        ({"robot_uids": "nobody"}, "is not a robot of ManiSkill"),
        ({"id": "TwoRobotPickCube-v1"}, "tasks of several robots"),
        ({"id": "PlugCharger-v1", "reward_mode": "dense"}, "has no reward dense"),
        ({"id": "PickSingleYCB-v1"}, "download_asset PickSingleYCB-v1"),
    ],
)
def test_what_maniskill_refuses_is_a_sentence(sapien, settings: dict[str, Any], sentence: str):
    with pytest.raises(BurnishError, match=sentence):
        make(**settings)


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"id": "os:system"}, "must be the name of a task"),
        ({"max_steps": 0}, r"env\.max_steps=0 must be at least 1"),
        ({"image_size": 2}, r"env\.image_size=2 must lie in"),
        ({"cameras": ["base_camera"]}, r"env\.obs=rgb only"),
        ({"shader": "rt-fst"}, "did you mean 'rt-fast'"),
        ({"reward_mode": "none"}, "is not a choice"),
        ({"camera": []}, "did you mean 'cameras'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_imported(settings: dict[str, Any], sentence: str):
    with pytest.raises(BurnishError, match=sentence):
        make(**settings)


def test_a_recipe_is_plain_data_that_makes_the_same_settings():
    config = ManiSkillConfig("PickCube-v1", Observations.rgb, ["base_camera"], reward_mode=RewardMode.dense)
    made = hosted(config, 2)
    assert made.id == "burnish.sim.external.maniskill:make" and made.kwargs.pop("threads") == 1
    assert made.kwargs["obs"] == "rgb" and "threads" not in hosted(config, 1).kwargs
    named = (made, GymConfig("metaworld", {"task": "push-v3"}), GymConfig("Hopper-v5", {"xml_file": "my.xml"}))
    assert [x.label for x in named] == [config.id, "metaworld push-v3", "Hopper-v5"]
    assert from_data(ManiSkillConfig, made.kwargs) == config


def test_settings_are_read_without_maniskill():
    code = "import sys, burnish.sim.external.maniskill as m; m.ManiSkillConfig(); print('mani_skill' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_missing_maniskill_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    with pytest.raises(BurnishError, match=r"pip install burnish\[maniskill\]"):
        make()


# ---- the batch ----


@pytest.mark.maniskill
def test_a_batch_of_one_is_the_world(sapien):
    world, env = make(), ManiSkillEnv(1, ManiSkillConfig(backend=Backend.cpu, max_steps=20))
    obs, _ = world.reset(seed=9)
    assert torch.equal(env.reset(seeds=[9 + (1 << 31)])["state"][0], torch.from_numpy(obs["state"]))  # folded
    assert env.spec.action_mode == "pd_ee_delta_pose" and env.spec.control_hz == 20 and env.spec.max_steps == 20
    for tick, action in enumerate(random_actions(20)):
        given = torch.from_numpy(action)[None]
        still = env.step(given, torch.tensor([False]))  # moves nothing
        assert torch.equal(still.obs["state"][0], torch.from_numpy(obs["state"]))
        obs, reward, terminated, _, info = world.step(action)
        step = env.step(given)
        assert torch.equal(step.obs["state"][0], torch.from_numpy(obs["state"])) and step.reward.tolist() == [reward]
        assert step.terminated.tolist() == [terminated] and step.info["success"].tolist() == [info["success"]]
        assert step.truncated.tolist() == [tick == 19] and torch.equal(step.info["executed"], given)
    with pytest.raises(BurnishError, match="reset it before it acts"):
        env.step(given)
    with pytest.raises(BurnishError, match="one world per process"):
        ManiSkillEnv(2, ManiSkillConfig(backend=Backend.cpu))


class StandIn:
    """What is asked of ManiSkill's batched simulation, with its habit to draw all worlds of a reset from one seed. A
    world shows where it began and how far it has gone; it has solved the task beyond 2, and failed below -2."""

    device, control_mode, control_freq, reconfiguration_freq = torch.device("cpu"), "pd_joint_delta_pos", 20, 0
    single_action_space = spaces.Box(-1, 1, (1,))
    scene = SimpleNamespace(step=lambda: None)

    def __init__(self, num_envs: int) -> None:
        self.begun, self.gone = torch.zeros(num_envs), torch.zeros(num_envs)

    def get_obs(self) -> torch.Tensor:
        return torch.stack([self.begun, self.gone], 1)

    def reset(self, seed: list[int] | int, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        seed = [seed] if isinstance(seed, int) else seed
        assert len(seed) == len(self.begun) and all(0 <= x < 1 << 32 for x in seed)
        rows = options.get("env_idx", torch.arange(len(self.begun)))
        self.begun[rows] = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed[0]))
        self.gone[rows] = 0
        return self.get_obs(), {}

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        self.gone += 0.5 + action[:, 0]  # goes on by itself, as physics does
        success, fail = self.gone > 2, self.gone < -2
        never = torch.zeros_like(success)
        return self.get_obs(), success, success | fail, never, {"success": success, "fail": fail}


def batch(num_envs: int, **settings: Any) -> ManiSkillEnv:
    config = ManiSkillConfig(max_steps=settings.pop("max_steps", 9), backend=Backend.cpu, **settings)
    return ManiSkillEnv(num_envs, config, simulation=StandIn(num_envs))


def test_rows_outside_mask_and_active_keep_what_they_saw():
    env = batch(4)
    first = env.reset(seeds=[1, 2, 3, 4])["state"].clone()
    some = torch.tensor([True, False, True, False])
    seen = env.step(torch.zeros(4, 1), some).obs["state"].clone()
    assert seen[:, 1].tolist() == [0.5, 0.0, 0.5, 0.0] and torch.equal(seen[:, 0], first[:, 0])

    again = env.reset(torch.tensor([True, False, False, False]), seeds=[7, 7, 7, 7])["state"].clone()
    assert again[0, 0] != seen[0, 0] and again[0, 1] == 0 and torch.equal(again[1:], seen[1:])
    both = env.step(torch.full((4, 1), 0.5), some)
    assert both.obs["state"][:, 1].tolist() == [1.0, 0.0, 1.5, 0.0]

    with pytest.raises(BurnishError, match=r"world 1 .*stood by"):  # its physics went on, unseen
        env.step(torch.zeros(4, 1))
    env.reset(~some, seeds=[1, 2, 3, 4])
    assert torch.equal(env.step(torch.zeros(4, 1)).obs["state"][~some, 0], first[~some, 0])


def test_a_batch_is_saved_and_begins_its_episodes_anew():
    env, fresh = batch(2), batch(2)
    env.reset()
    fresh.load_state_dict(env.state_dict())
    assert not continues(fresh) and torch.equal(fresh.reset()["state"], env.reset()["state"])


def test_a_world_of_a_batch_begins_as_its_own_seed_says():
    alone = [batch(1).reset(seeds=[seed])["state"][0, 0] for seed in (1, 2, 3, 4)]
    assert torch.equal(batch(4).reset(seeds=[1, 2, 3, 4])["state"][:, 0], torch.stack(alone))
    # The negative control, which is quicker: the first seed decides for all.
    together = batch(4, seed_each=False)
    starts = together.reset(seeds=[1, 2, 3, 4])["state"][:, 0].clone()
    assert torch.equal(starts, together.reset(seeds=[1, 5, 5, 5])["state"][:, 0])
    # Even so episodes do not repeat themselves in a world that is reset alone.
    third = torch.tensor([False, False, True, False])
    assert len({float(together.reset(third)["state"][2, 0]) for _ in range(3)}) == 3


def test_worlds_of_a_batch_end_each_by_itself():
    env = batch(3, max_steps=4)
    env.reset()
    ends = [env.step(torch.tensor([[0.5], [-1.0], [-0.5]])) for _ in range(2)]
    assert not any(bool((step.terminated | step.truncated).any()) for step in ends)
    step = env.step(torch.tensor([[0.5], [-9.0], [-0.5]]))  # is clipped to -1: -1.5 in all
    assert step.info["executed"][1] == -1 and step.terminated.tolist() == [True, False, False]
    assert step.reward.tolist() == [1, 0, 0] and step.info["success"].tolist() == [True, False, False]
    step = env.step(torch.zeros(3, 1), torch.tensor([False, True, True]))
    assert step.terminated.tolist() == [False] * 3 and step.truncated.tolist() == [False, True, True]

    env = batch(1, end_at_success=False)
    env.reset()
    for _ in range(3):
        step = env.step(torch.ones(1, 1))
    assert step.info["success"].tolist() == [True] and step.terminated.tolist() == [False]
    env.reset()
    for _ in range(5):
        step = env.step(-torch.ones(1, 1))
    assert step.terminated.tolist() == [True]  # it has failed, which ends it in any case


@pytest.mark.maniskill
@pytest.mark.parametrize(("reward", "paid"), [(Reward.until_success, -1.0), (Reward.given, 0.0)])
def test_the_batch_pays_as_single_worlds_do(sapien, reward, paid):
    config = ManiSkillConfig("PushCube-v1", backend=Backend.cpu, reward=reward, processes=0)
    for env in (ManiSkillEnv(1, config), ExternalEnv(1, hosted(config, 1))):
        env.reset(seeds=[0])
        assert env.step(torch.zeros(1, 7)).reward.tolist() == [paid]


@pytest.mark.maniskill
@pytest.mark.gpu
def test_a_batch_on_a_gpu_begins_and_masks_as_one_on_a_cpu(sapien):
    env = ManiSkillEnv(4, ManiSkillConfig(backend=Backend.gpu))
    assert env.device.type == "cuda"
    first = env.reset(seeds=[1, 2, 3, 4])["state"].clone()
    some = torch.tensor([True, False, True, False], device=env.device)
    seen = env.step(torch.zeros(4, 7, device=env.device), some).obs["state"].clone()
    assert torch.equal(seen[~some], first[~some]) and not torch.equal(seen[some], first[some])
    again = env.reset(seeds=[4, 2, 3, 1])["state"]
    assert torch.allclose(again[[3, 1, 2, 0]], first, atol=1e-5)
