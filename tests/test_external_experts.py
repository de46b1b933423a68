"""Experts of other packages: they succeed where nothing and noise fail, repeat themselves, and err as they are told."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.core.errors import BurnishError
from burnish.policies.data.episodes import NO_SUCCESS
from burnish.policies.data.lerobot import read_lerobot
from burnish.sim.__main__ import GROUPS, CollectConfig
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import hosted, make_expert
from burnish.sim.experts.hosted import LEVELS, Bias, Errors
from burnish.sim.external import experts
from burnish.sim.external.planning import RECIPE
from burnish.sim.external.recipes import WORLDS
from burnish.sim.external.settings import GymConfig

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

# Preset -> its package; one of each package is quick.
PRESETS = {
    "metaworld_push": "metaworld",
    "ogbench_cube_single": "ogbench",
    "fetch_push": "gymnasium_robotics",
    "robosuite_lift": "robosuite",
    "pusht": "gym_pusht",
}
FURTHER = {
    "metaworld_pick_place": "metaworld",
    "metaworld_door_open": "metaworld",
    "metaworld_button_press": "metaworld",
    "ogbench_cube_double": "ogbench",
    "fetch_reach": "gymnasium_robotics",
    "fetch_pick_place": "gymnasium_robotics",
    "robosuite_stack": "robosuite",
    "robosuite_door": "robosuite",
    "maniskill_push_cube": "mani_skill",
    "maniskill_pick_cube": "mani_skill",
    "maniskill_stack_cube": "mani_skill",
    "maniskill_peg_insertion": "mani_skill",
}
SEEDS = [100, 101]


class Rest:
    """A controller that always acts the same, or draws."""

    def __init__(self, env: Any, draws: bool) -> None:
        self.shape, self.source = (env.num_envs, env.spec.action.dim), torch.Generator().manual_seed(0)
        self.size = 1.0 if draws else 0.0

    def reset(self, mask: Any, seeds: Any = None) -> None: ...

    def step(self, obs: Any) -> torch.Tensor:
        return self.size * (2 * torch.rand(self.shape, generator=self.source) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "package"), [*PRESETS.items(), *FURTHER.items()])
def test_the_expert_succeeds_where_nothing_and_noise_fail(preset, package, require, monkeypatch):
    require(package)
    if package == "mani_skill" and WORLDS.made(RECIPE) is None:
        pytest.skip(f"`burnish worlds add {RECIPE}` was not called on this machine")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    words = [f"env={preset}", "env.processes=0"]
    # Where something was touched, ManiSkill repeats an episode bit for bit in a new scene alone.
    words += ["env.rebuild=true"] if package == "mani_skill" else []
    config = to_object(compose("collect", CollectConfig, GROUPS["collect"], words)).env
    env = make_env(config, 2)
    played = collect(env, make_expert(config, 2, env=env), SEEDS).episodes
    assert all(episode.success and episode.terminated for episode in played)
    again = collect(env, make_expert(config, 2, env=env), SEEDS[::-1]).episodes[::-1]
    assert all(torch.equal(x.action, y.action) for x, y in zip(played, again, strict=True)), "nothing is left over"
    for draws in (False, True):
        assert not any(episode.success for episode in collect(env, Rest(env, draws), SEEDS).episodes)


def test_an_expert_is_chosen_by_the_package_of_the_environment():
    with pytest.raises(BurnishError, match="no expert for environments of gymnasium; there are experts for metaworld"):
        config = GymConfig(processes=0)
        make_expert(config, 1, env=make_env(config, 1))


def test_an_installed_package_announces_its_expert(monkeypatch):
    config = GymConfig("odd_worlds:Passing", max_steps=5, control_hz=10.0, processes=0)
    env: Any = make_env(config, 1)
    with pytest.raises(BurnishError, match="has no expert 'theirs'"):
        make_expert(config, 1, "theirs", env=env)
    monkeypatch.setattr(hosted, "entry_points", lambda group: [EntryPoint("theirs", "odd_worlds:Looking", group)])
    expert = make_expert(config, 1, "theirs", env=env)
    env.reset(seeds=[1])
    assert isinstance(expert, hosted.HostedExpert) and env.workers.links[0]._host.experts


# ---- Errors, on an expert in a world that only counts ----


class Counting(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gymnasium.spaces.Box(np.float32([-2, -10]), np.float32([2, 10]))

    def reset(self, *, seed=None, options=None):
        self.tick = 0
        return np.zeros(1), {}

    def step(self, action):
        self.tick += 1
        return np.array([self.tick / 1000]), 0.0, False, False, {}


class Straight:
    """Always acts half of its limits."""

    still = np.array([0.0, np.nan])

    def __init__(self, env: Any) -> None: ...

    def reset(self, obs: Any, info: Any) -> None: ...

    def act(self, obs: Any, info: Any) -> Any:
        return np.array([1.0, 5.0])


class Failing(Straight):
    def act(self, obs: Any, info: Any) -> Any:
        raise KeyError("grip")


class Lost(Straight):
    def act(self, obs: Any, info: Any) -> Any:
        return np.array([np.nan, 0.0])


class Unready(Straight):
    def reset(self, obs: Any, info: Any) -> None:
        raise LookupError("no plan")


class Finite(Straight):
    """A plan of three actions."""

    def reset(self, obs: Any, info: Any) -> None:
        self.plan = iter([np.array([1.0, 5.0])] * 3)

    def act(self, obs: Any, info: Any) -> Any:
        return next(self.plan)


class Repeating(Straight):
    still = np.array([np.nan, np.nan])


def acted(errors: Errors, seed: int = 0, expert: str = "Straight", worlds: int = 1, ticks: int = 1000) -> torch.Tensor:
    """(ticks, N, 2) in [-1, 1]; world i plays the episode of seed i."""
    config = GymConfig("test_external_experts:Counting", max_steps=2000, processes=0)
    env = make_env(config, worlds)
    controller = make_expert(config, worlds, f"test_external_experts:{expert}", seed, env=env, errors=errors)
    obs, found = env.reset(seeds=list(range(worlds))), []
    controller.reset(torch.ones(worlds, dtype=torch.bool), list(range(worlds)))
    for _ in range(ticks):
        found.append(controller.step(obs))
        obs = env.step(found[-1] * torch.tensor([2.0, 10.0])).obs
    return torch.stack(found)


def limited(steps: int) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Counting(), steps)


def test_the_limit_of_a_function_s_own_wrapper_counts():
    config = GymConfig("test_external_experts:limited", kwargs={"steps": 7}, processes=0)
    assert make_env(config, 1).spec.max_steps == 7
    assert make_env(replace(config, max_steps=5), 1).spec.max_steps == 5


def test_a_world_that_reports_no_success_has_none_to_count(tmp_path, capsys):
    words = ["env=gym", "env.id=test_external_experts:Counting", "env.max_steps=5", "env.processes=0"]
    words += ["expert=test_external_experts:Straight", "episodes=2", "worlds=1"]
    assert main(["collect", *words, f"out={tmp_path}/set"]) == 0
    said = capsys.readouterr().out
    assert "2 episodes, 10 frames, success unknown" in said and "no step reported a success" in said
    assert main(["collect", *words, f"out={tmp_path}/set", "resume=true", "episodes=3"]) == 0
    assert NO_SUCCESS in read_lerobot(tmp_path / "set").meta["notes"]
    assert main(["collect", *words, "env.success_reward=0", f"out={tmp_path}/other"]) == 0
    assert "2 successful" in capsys.readouterr().out
    assert NO_SUCCESS not in read_lerobot(tmp_path / "other").meta.get("notes", [])


@pytest.mark.parametrize(("processes", "restart"), [(0, True), (1, False), (1, True)])
@pytest.mark.parametrize(
    ("expert", "error"),
    [("Failing", "KeyError"), ("Lost", r"its action \[nan"), ("Unready", "LookupError: no plan")],
)
def test_an_expert_that_fails_is_not_told_as_its_world(expert, error, processes, restart):
    config = GymConfig(
        "test_external_experts:Counting", max_steps=5, control_hz=10, processes=processes, restart=restart
    )
    with pytest.raises(BurnishError, match=f"the expert beside test_external_experts:Counting failed: {error}"):
        collect(env := make_env(config, 1), make_expert(config, 1, f"test_external_experts:{expert}", env=env), [0])


def test_an_expert_is_not_asked_once_its_episode_is_over_and_a_success_on_the_way_counts():
    config = GymConfig("odd_worlds:Passing", max_steps=3, control_hz=10, processes=0)
    expert = "test_external_experts:Finite"
    found = collect(env := make_env(config, 2), make_expert(config, 2, expert, env=env), [0, 1, 2]).episodes
    assert [(len(episode), episode.success) for episode in found] == [(3, True)] * 3
    # Control: a success that no tick has.
    never = GymConfig("odd_worlds:Passing", {"at": 9}, max_steps=3, control_hz=10, processes=0)
    found = collect(env := make_env(never, 2), make_expert(never, 2, expert, env=env), [0]).episodes
    assert not found[0].success


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Rounded", "as uint8 of shape .*not float64"),
        ("Wrapped", "as uint8 of shape .*not int64"),
        ("Strange", ""),
    ],
)
def test_what_a_world_declares_and_gives_must_fit_and_what_else_it_holds_is_its_own(name, sentence):
    env = make_env(GymConfig(f"odd_worlds:{name}", max_steps=3, control_hz=10, processes=0), 1)
    if sentence:
        with pytest.raises(BurnishError, match=sentence):
            env.reset(seeds=[3])
        return
    env.reset(seeds=[3])
    first = env.step(torch.zeros(1, 2)).reward
    env.reset(seeds=[3])
    assert torch.equal(env.step(torch.zeros(1, 2)).reward, first), "its generator, of another kind, is seeded"


def test_without_errors_it_is_the_expert_itself():
    assert torch.equal(acted(Errors(), ticks=20), torch.full((20, 1, 2), 0.5))


def test_noise_is_new_in_every_step_and_belongs_to_the_episode():
    action = acted(Errors(noise=0.1), worlds=2)
    assert torch.equal(acted(Errors(noise=0.1), ticks=50)[:, 0], action[:50, 0]), "in whichever company"
    assert not torch.isclose(action[:, 0], action[:, 1]).any(1).all()
    # 2,000 draws: a standard error of 0.0022 for the mean, and of 1.6 % for the deviation.
    assert abs(action[:, 0].mean() - 0.5) < 0.01 and abs(action[:, 0].std() - 0.1) < 0.01
    assert abs(np.corrcoef(action[1:, 0, 0], action[:-1, 0, 0])[0, 1]) < 0.15


def test_a_bias_is_the_same_in_every_episode_and_another_for_another_person():
    one, other = acted(Errors(bias=0.1), worlds=2), acted(Errors(bias=0.1), seed=1)
    assert torch.equal(one[:, 0], one[:, 1]) and (one[:, 0] - other[:, 0]).abs().mean() > 0.02
    assert one.diff(dim=0).abs().max() < 0.01, "smooth: it changes over `scale`, which is 300 steps here"
    drawn = [Bias(3, 2, 0.3, seed)(torch.randn(200, 3), torch.zeros(200, 2)).std() for seed in range(20)]
    assert abs(np.mean(drawn) - 1) < 0.15, "of standard deviation 1 over situations"


def test_a_hand_that_hesitates_does_not_move_and_keeps_its_grip():
    action = acted(Errors(hesitation=0.05, pause=5.0))[:, 0]
    stopped = action[:, 0] == 0
    assert set(action.unique().tolist()) == {0.0, 0.5} and (action[:, 1] == 0.5).all()
    # After each 1 / 0.05 steps of motion a stop of 5; some 40 stops have a standard error of 0.03 in their share.
    assert abs(stopped.float().mean() - 5 / 25) < 0.1
    repeated = acted(Errors(noise=0.1, hesitation=0.05, pause=5.0), expert="Repeating")[:, 0]
    assert abs((repeated[1:] == repeated[:-1]).all(1).float().mean() - 0.2) < 0.1


def test_actions_stay_within_their_limits_and_errors_within_theirs():
    assert acted(Errors(noise=5.0), ticks=50).abs().max() == 1.0
    with pytest.raises(BurnishError, match=r"errors\.noise=-0\.1"):
        Errors(noise=-0.1)
    assert list(LEVELS) == ["clean", "noisy", "clumsy"]


def test_the_room_needs_numpy_and_the_package_that_a_file_serves():
    """It also runs where neither torch nor the rest of ours is installed."""
    for file in Path(experts.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, file.name
                names = [node.module or ""] if node.level == 0 else []
            for name in names:
                top = name.partition(".")[0]
                assert top in {*sys.stdlib_module_names, "numpy", file.stem}, f"{file.name} imports {name}"
