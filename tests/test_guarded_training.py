"""Refinement with a robot's guard active: limits kept at the actuators, remembered by whatever remembers a world."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

from burnish.finetune.compare.compare import CompareConfig, Player
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.controllers import controller_for
from burnish.policies.core.config import LATER, from_data, to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.views import ResidualEnv
from burnish.policies.measure.evaluate import Evaluation
from burnish.policies.runs.run import read_metrics
from burnish.real_robot.env import GuardedEnv
from burnish.sim.build import make_env, origin_of, world_from
from burnish.sim.desk import ActionMode, Reward
from burnish.sim.guard import GuardConfig
from burnish.sim.mirror import Mirror
from burnish.sim.randomize import RandomizeConfig
from burnish.sim.tasks.avoid import AvoidConfig
from burnish.sim.tasks.insert import InsertConfig
from burnish.sim.tasks.pick_place import PickPlaceConfig
from burnish.sim.tasks.reach import ReachConfig

pytestmark = pytest.mark.sim

GUARD = GuardConfig(velocity=0.5, acceleration=4.0)
WORDS = ["env.guard.velocity=0.5", "env.guard.acceleration=4"]
# What rounding may add to a velocity and to an acceleration, of their limits (docstring of real_robot/safety/guard.py).
MORE = (1e-9, 1e-6)


def made(config: Any, num_envs: int) -> Any:
    """Worlds whose insides are looked at here."""
    return make_env(config, num_envs)


def actions(env, ticks: int, seed: int = 0) -> list[torch.Tensor]:
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    generator = torch.Generator().manual_seed(seed)
    return [low + (high - low) * torch.rand(env.num_envs, len(low), generator=generator) for _ in range(ticks)]


@pytest.fixture
def watched(monkeypatch):
    """Of each world, (nu,) at the actuators themselves whenever physics are stepped."""
    step = mujoco.mj_step

    def begin(env) -> list[list[np.ndarray]]:
        worlds = {id(data): i for i, data in enumerate(env.physics.data)}
        seen = [[ctrl] for ctrl in env.physics.ctrl()]

        def noting(model, data, count=1):
            if id(data) in worlds:
                seen[worlds[id(data)]].append(data.ctrl.copy())
            step(model, data, count)

        monkeypatch.setattr(mujoco, "mj_step", noting)
        return seen

    return begin


def excess(seen: list[list[np.ndarray]], period_s: float = 0.01) -> tuple[float, float]:
    """The largest velocity and acceleration of set-points, in shares of the limits; at rest before the first."""
    velocities = [np.diff([path[0], *path], axis=0) / period_s for path in seen]
    speeding = max(np.abs(np.diff(v, axis=0)).max() for v in velocities) / period_s
    return max(np.abs(v).max() for v in velocities) / GUARD.velocity, speeding / GUARD.acceleration


@pytest.mark.parametrize(
    "config", [InsertConfig(), ReachConfig(), AvoidConfig(), PickPlaceConfig()], ids=lambda c: type(c).__name__
)
def test_limits_hold_at_the_actuators_and_only_with_the_guard(config, watched):
    """The control has the same actions and no guard. Its set-points jump once per tick, so even in terms of a tick,
    which flatters it, they are faster than the limits by far."""
    for guard, ticks in ((GUARD, 30), (GuardConfig(), 30)):
        env = made(replace(config, guard=guard, max_steps=1000), 3)
        env.reset(seeds=[1, 2, 3])
        seen = watched(env)
        for action in actions(env, ticks):
            step = env.step(action)
        if guard.any():
            assert [len(path) for path in seen] == 3 * [1 + 5 * ticks], "100 Hz at 20 ticks a second"
            velocity, acceleration = excess(seen)
            assert 0.9 < velocity <= 1 + MORE[0] and 0.9 < acceleration <= 1 + MORE[1]
            assert (step.info["guarded"] > 5).all()
            low, high = env.physics.model.actuator_ctrlrange.T
            assert ((low <= np.array(seen)) & (np.array(seen) <= high)).all()
        else:
            velocity, acceleration = excess(seen, 0.05)
            assert velocity > 1.5 and acceleration > 5 and "guarded" not in step.info


def test_actions_that_are_no_numbers_stop_the_arm_instead_of_breaking_the_world(watched):
    env = made(ReachConfig(guard=GUARD, action=ActionMode.joint_target), 2)
    env.reset(seeds=[1, 2])
    seen = watched(env)
    for action in actions(env, 4):
        env.step(action)
    for _ in range(10):
        env.step(torch.full((2, 6), torch.nan))
    velocity, acceleration = excess(seen)
    assert np.isfinite(seen).all() and velocity <= 1 + MORE[0] and acceleration <= 1 + MORE[1]
    assert all((path[-1] == path[-2]).all() for path in seen), "at rest"


def test_a_world_of_settings_is_the_world_that_a_program_guards():
    config = ReachConfig(max_steps=100)
    ours = made(replace(config, guard=GUARD), 2)
    bare = made(config, 2)
    theirs = GuardedEnv(bare, GUARD.limits(bare.physics.model.actuator_ctrlrange))
    for env in (ours, theirs):
        env.reset(seeds=[4, 5])
    for action in actions(ours, 10):
        a, b = ours.step(action), theirs.step(action)
        assert torch.equal(a.obs["state"], b.obs["state"]) and torch.equal(a.info["guarded"], b.info["guarded"])
    free = made(config, 2)
    free.reset(seeds=[4, 5])
    assert not torch.equal(free.step(actions(ours, 1)[0]).obs["state"], a.obs["state"])


def test_one_world_that_begins_anew_or_waits_is_alone_with_its_guard(watched):
    """Guarded, world 1 of three goes bit for bit as if it were alone, and so does its count; what begins anew begins at
    rest. Limits hold between two resets."""
    env, alone = (made(InsertConfig(guard=GUARD, max_steps=100), n) for n in (3, 1))
    env.reset(seeds=[1, 2, 3])
    alone.reset(seeds=[2])
    seen = watched(env)
    everyone, moves = torch.ones(3, dtype=torch.bool), actions(env, 20)
    for tick, action in enumerate(moves):
        if tick % 4 == 3:
            before = env.shaper.changed.copy()
            step = env.step(action, torch.tensor([True, False, True]))
            assert step.info["guarded"][1] == before[1]
            continue
        step, other = env.step(action, everyone), alone.step(action[1:2])
        assert torch.equal(step.obs["state"][1], other.obs["state"][0])
        assert step.info["guarded"][1] == other.info["guarded"][0]
    velocity, acceleration = excess(seen)
    assert velocity <= 1 + MORE[0] and acceleration <= 1 + MORE[1]
    env.reset(torch.tensor([True, False, False]), [9, 0, 0])
    assert env.shaper.changed[0] == 0 and env.shaper.changed[1] > 0
    begun = env.physics.ctrl()
    seen[0].clear()
    env.step(moves[0])
    assert np.abs(seen[0][0] - begun[0]).max() <= GUARD.acceleration * 0.01**2 * (1 + MORE[1]), "from rest"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A flow that has imitated a little, in a world without a guard."""
    folder = tmp_path_factory.mktemp("lab")
    words = ["env=reach", "env.max_steps=12", "env.reward=dense", "episodes=6"]
    assert main(["collect", *words, f"out={folder}/data"]) == 0
    words = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    assert main(["pretrain", *words, *EVALUATION, f"data={folder}/data", f"out={folder}/base"]) == 0
    return folder


EVALUATION = ["eval.episodes=4", "eval.worlds=4", "eval.confirm=2"]
SAC = ["method.sac.critic.hidden=[8]", "method.sac.critic.members=2", "method.sac.agent.hidden=[8]"]
WORLD = ["env=reach", "env.max_steps=12", "env.reward=dense", *WORDS]


def finetune(lab, *words):
    loop = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.updates_per_decision=0.5"]
    small = ["worlds=2", "total=48", "log_every=4", "save_every=8", *EVALUATION, *loop, *SAC]
    return ["finetune", f"policy.path={lab}/base", "method=dsrl", *small, *words]


def weights(checkpoint):
    return {p.relative_to(checkpoint): p.read_bytes() for p in sorted(checkpoint.rglob("*.safetensors"))}


def lines(run):
    return [{k: repr(v) for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def test_looking_ahead_and_looking_on_move_no_guard(lab):
    """What the base would do next is asked of the base alone; nor do saving and a reset of nobody count."""
    base, origin = load_policy(lab / "base")
    world = world_from(origin["env"])
    one, two = (ResidualEnv(ScaledEnv(made(replace(world, guard=GUARD), 2)), controller_for(base, 2)) for _ in "ab")
    for env in (one, two):
        env.reset(seeds=[1, 2])
    for tick in range(8):
        looked = one.base.peek(one._obs)
        one.state_dict()
        one.reset(torch.zeros(2, dtype=torch.bool))
        a, b = (env.step(torch.full((2, 6), 0.3)[:, : env.spec.action.dim]) for env in (one, two))
        assert torch.equal(a.obs["state"], b.obs["state"]) and torch.equal(a.info["guarded"], b.info["guarded"]), tick
        assert torch.equal(a.info["executed"], b.info["executed"]) and looked.isfinite().all()


def test_what_was_refined_with_the_guard_is_evaluated_with_it_unasked(lab, tmp_path, capsys):
    assert main([*finetune(lab, *WORLD), f"out={tmp_path}/run"]) == 0
    _, origin = load_policy(tmp_path / "run")
    assert origin["env"]["config"]["guard"] == {"velocity": 0.5, "acceleration": 4.0, "rate_hz": 100.0}
    found = {}
    for name, words in {"unasked": [], "asked": WORLD, "without": WORLD[:3]}.items():
        words = ["evaluate", f"policy.path={tmp_path}/run", *EVALUATION, *words, f"out={tmp_path}/{name}"]
        assert main(words) == 0
        found[name] = Evaluation.load(tmp_path / name / "evaluation.json")
    about = json.loads((tmp_path / "unasked/about.json").read_text())
    assert about["world"] == origin["env"] == origin_of(ReachConfig(max_steps=12, reward=Reward.dense, guard=GUARD))
    assert found["unasked"] == found["asked"] and found["asked"] != found["without"]
    # What it plays, and what is refined from it in turn, is guarded as well.
    assert main(["collect", f"policy.path={tmp_path}/run", "episodes=2", f"out={tmp_path}/played"]) == 0
    assert '"velocity": 0.5' in "".join(p.read_text() for p in (tmp_path / "played/meta").glob("*.json"))
    capsys.readouterr()
    # Episodes of a guarded and of a free world are no pairs.
    words = ["evaluate", f"policy.path={tmp_path}/run", f"against={lab}/base", *EVALUATION]
    assert main(words) == 2 and "were trained for different worlds" in capsys.readouterr().err
    assert main([*words, *WORLD]) == 0


def test_a_guarded_refinement_goes_on_as_if_it_had_never_stopped(lab, tmp_path):
    """From a checkpoint in the middle of episodes. The control forgets what the guard had sent last."""
    words = finetune(lab, *WORLD)
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    last = sorted((tmp_path / "whole/checkpoints").glob("0*"))[-1]
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/checkpoints" / last.name)
    assert main([*words, f"out={tmp_path}/stopped", "resume=true"]) == 0
    assert weights(tmp_path / "stopped/checkpoints" / last.name) == weights(last)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")

    one, two = (made(ReachConfig(guard=GUARD), 2) for _ in "ab")
    one.reset(seeds=[1, 2])
    moves = actions(one, 6)
    for action in moves[:3]:
        one.step(action)
    saved = one.state_dict()
    two.load_state_dict(saved)
    forgetful = made(ReachConfig(guard=GUARD), 2)
    forgetful.load_state_dict({**saved, "shaper.v": torch.zeros_like(saved["shaper.v"])})
    for action in moves[3:]:
        a, b, c = (env.step(action) for env in (one, two, forgetful))
        assert torch.equal(a.obs["state"], b.obs["state"]) and torch.equal(a.info["guarded"], b.info["guarded"])
        assert not torch.equal(a.obs["state"], c.obs["state"])


def test_a_state_of_guarded_worlds_is_for_guarded_worlds():
    guarded, free = made(ReachConfig(guard=GUARD), 2), made(ReachConfig(), 2)
    with pytest.raises(BurnishError, match="one of guarded worlds, and these have no guard"):
        free.load_state_dict(guarded.state_dict())
    with pytest.raises(BurnishError, match=r"has nothing as 'shaper\.q'"):
        guarded.load_state_dict(free.state_dict())


CODE = "import sys, torch; torch.set_num_threads(1); from burnish.policies.cli.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_kill_9_of_a_guarded_refinement_loses_nothing_but_time(lab, tmp_path):
    command = [sys.executable, "-c", CODE, *finetune(lab, *WORLD, "total=600", "save_every=48", "log_every=16")]
    subprocess.run([*command, f"out={tmp_path}/whole"], check=True, capture_output=True)
    last = sorted((tmp_path / "whole/checkpoints").glob("0*"))[-1]
    killed = [*command, f"out={tmp_path}/killed", "resume=true"]
    process = subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 180
    while len(list((tmp_path / "killed/checkpoints").glob("0*"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not (tmp_path / "killed/checkpoints" / last.name).exists()
    subprocess.run(killed, check=True, capture_output=True)
    assert weights(tmp_path / "killed/checkpoints" / last.name) == weights(last)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


@dataclass
class Grown:
    old: int = 1
    new: GuardConfig = field(default_factory=GuardConfig, metadata=LATER)


def test_worlds_without_a_guard_are_written_as_they_were_before_there_was_one():
    """So that they are equal to what older datasets and checkpoints remember, and hash to the same (test_frozen.py)."""
    assert to_data(Grown()) == {"old": 1}
    assert to_data(Grown(new=GUARD))["new"]["velocity"] == 0.5
    for made in (Grown(), Grown(new=GUARD)):
        assert from_data(Grown, to_data(made)) == made
    assert "guard" not in to_data(InsertConfig()) and "randomize" in to_data(InsertConfig())
    guarded = replace(InsertConfig(), guard=GUARD)
    assert world_from(origin_of(guarded) or {}) == guarded and origin_of(guarded) != origin_of(InsertConfig())


def test_a_guarded_world_can_be_deployed():
    """The guard of a robot is the robot's own: what is asked of it is what is asked in a world without one."""
    asked = []
    for config in (InsertConfig(guard=GUARD), InsertConfig()):
        mirror = Mirror(config)
        mirror.begin(3)
        asked.append(mirror.targets(np.array(mirror.spec.action.high)))
    assert np.array_equal(*asked)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["env=reach", "env.guard.velocity=1"], "guard.acceleration is missing, or give neither"),
        (["env=reach", "env.guard.acceleration=1"], "guard.velocity is missing, or give neither"),
        (["env=reach", "env.guard.velocity=-1"], "guard.velocity=-1.0 must be at least 0"),
        (["env=reach", "env.guard.rate_hz=0"], "guard.rate_hz=0.0 must be a positive number"),
        (["env=reach", *WORDS, "env.guard.rate_hz=30"], "does not divide a tick of 0.05 s"),
        (["env=reach", *WORDS, "env.randomize.latency_s=0.01"], "cannot be had at once"),
        (["env=reach", "env.guard.speed=1"], "there is no setting 'env.guard.speed'"),
        (["env=hopper", *WORDS], "there is no setting 'env.guard"),
        ([*WORDS], "choose env=... first"),
    ],
)
def test_what_cannot_be_is_one_sentence(lab, tmp_path, capsys, words, sentence):
    assert main([*finetune(lab, *words), f"out={tmp_path}/run"]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_comparison_can_be_in_a_guarded_world(tmp_path):
    """Every run, every evaluation and every film is said the same words about the world."""
    file = tmp_path / "guarded.yaml"
    file.write_text("defaults:\n  - override /env: reach\nenv:\n  guard: {velocity: 0.5, acceleration: 4}\n")
    player = Player(CompareConfig("base", ["dsrl"], world=str(file)), tmp_path, None, 1)  # type: ignore[arg-type]
    assert player.world == ["env=reach", "env.guard.velocity=0.5", "env.guard.acceleration=4"]
    for text, sentence in (
        ("total: 3", "must choose a world"),
        ("defaults: [override /env: reach]\ntotal: 3", "nothing else"),
    ):
        file.write_text(text)
        with pytest.raises(BurnishError, match=sentence):
            Player(CompareConfig("base", ["dsrl"], world=str(file)), tmp_path, None, 1)  # type: ignore[arg-type]
    with pytest.raises(BurnishError, match="is no file"):
        Player(CompareConfig("base", ["dsrl"], world="nowhere.yaml"), tmp_path, None, 1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_comparison_says_that_its_world_was_guarded(lab, tmp_path):
    method, world = tmp_path / "small.yaml", tmp_path / "guarded.yaml"
    method.write_text(
        "defaults: [override /method: dsrl]\nworlds: 2\nmethod:\n  loop: {warmup: 8, batch: 8}\n"
        "  sac: {critic: {hidden: [8], members: 2}, agent: {hidden: [8]}}\n"
    )
    world.write_text(
        "defaults: [override /env: reach]\nenv: {max_steps: 12, guard: {velocity: 0.5, acceleration: 4}}\n"
    )
    words = [f"base={lab}/base", f"methods={method}", f"world={world}", "seeds=1", "budget=96", "episodes=4"]
    words += ["evaluations=1", "evaluation_episodes=4", "worlds=4", "videos=0", f"out={tmp_path}/compare"]
    assert main(["compare", *words]) == 0
    found = json.loads((tmp_path / "compare/compare.json").read_text())
    assert found["world"] == origin_of(ReachConfig(max_steps=12, guard=GUARD))
    _, origin = load_policy(tmp_path / "compare/runs/small-0")
    assert origin["env"] == found["world"]
    world.write_text("defaults: [override /env: reach]\n")
    assert main(["compare", *words, "resume=true"]) == 2, "another world under the same name"


def test_randomised_worlds_can_be_guarded(watched):
    """Masses, gains and friction of their own; only late actions are refused."""
    config = ReachConfig(guard=GUARD, randomize=RandomizeConfig(mass=0.3, gains=0.3, friction=0.3))
    env = made(config, 2)
    env.reset(seeds=[1, 2])
    seen = watched(env)
    for action in actions(env, 10):
        env.step(action)
    velocity, acceleration = excess(seen)
    assert velocity <= 1 + MORE[0] and acceleration <= 1 + MORE[1]
