"""A robot as a world: the same code, the same success; and worlds with a robot's guard."""

from __future__ import annotations

import io
import os
import struct
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.real_robot.adapter import Phase
from burnish.real_robot.camera import Watched
from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.env import CameraObservations, GuardedEnv, RobotEnv, each_anew
from burnish.real_robot.errors import Refused, StaleState
from burnish.real_robot.safety.guard import Limits
from burnish.real_robot.safety.safe_robot import Rung, Safety
from burnish.real_robot.supervisor import NOTHING, Gamepad, Keyboard, Scripted, Word
from burnish.sim import arm
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.desk import ActionMode
from burnish.sim.experts import make_expert
from burnish.sim.mirror import Mirror
from burnish.sim.randomize import RandomizeConfig
from burnish.sim.tasks.insert import InsertConfig
from burnish.sim.tasks.push import PushConfig
from burnish.sim.tasks.reach import ReachConfig
from burnish.sim.two_mode import TwoModeConfig
from fake_camera import FakeCamera

pytestmark = pytest.mark.sim
SAFETY = Safety(rate_hz=100.0, blend_s=0.0)


def robot(config, supervisor=None, safety=SAFETY, **twin) -> RobotEnv:
    mirror = Mirror(config)

    def connect(start):
        settings = {"mjcf": mirror.mjcf, "joints": mirror.joints, "start": start.tolist(), **twin}
        return LocalLink(Twin(TwinConfig(**settings), VirtualClock()), safety)

    return RobotEnv(mirror, each_anew(connect), supervisor=supervisor)


def test_what_a_robot_sees_at_the_start_is_what_the_world_shows():
    """The twin's first measurement is a control tick old, in which gravity has moved the arm by less than a
    milliradian; the state scales angles by 1, distances by up to 500 per metre, and targets ahead by 100 per radian."""
    seeds = evaluation_seeds(3)
    for seed in seeds:
        real, simulated = robot(InsertConfig()), make_env(InsertConfig(), 1)
        a, b = real.reset(seeds=[seed])["state"], simulated.reset(seeds=[seed])["state"]
        assert a.shape == b.shape and (a - b).abs().max() < 0.25
        assert (a[:, :6] - b[:, :6]).abs().max() < 1e-3
        other = simulated.reset(seeds=[seed + 1])["state"]
        assert (a - other).abs().max() > 1.0, "another layout would not have been noticed"
        real.close()


class Replayed:
    """Plays what an expert did in simulation."""

    def __init__(self, actions):
        self._actions, self._at = actions, 0

    def reset(self, mask, seeds=None):
        self._at = 0

    def step(self, obs):
        self._at += 1
        return self._actions[min(self._at, len(self._actions)) - 1][None]


def expert_actions(config, seed: int) -> torch.Tensor:
    world = make_env(config, 1)
    expert = make_expert(config, 1, "clean", env=world)
    obs = world.reset(seeds=[seed])
    expert.reset(torch.ones(1, dtype=torch.bool), [seed])
    scaled, actions = ScaledEnv(world), []
    while True:
        actions.append(expert.step(obs)[0])
        step = scaled.step(actions[-1][None])
        obs = step.obs
        if bool(step.terminated | step.truncated):
            assert bool(step.info["success"])
            return torch.stack(actions)


def test_what_works_in_simulation_works_on_the_twin_behind_the_guard():
    seeds = evaluation_seeds(2, stream="robot")
    real = robot(InsertConfig())
    for seed in seeds:
        actions = expert_actions(InsertConfig(), seed)
        found = evaluate(ScaledEnv(real), Replayed(actions), [seed])
        assert found.success == [True] and not found.repeatable
        idle = evaluate(ScaledEnv(real), Replayed(torch.zeros_like(actions)), [seed])
        assert idle.success == [False], "it succeeds whatever is done"
    real.close()
    counts = [report["counts"] for report in real.reports]
    assert len(counts) == 4 and all(c["start"] == 1 and not c.get("fault") for c in counts)


class Seen:
    """A twin behind a camera, on one clock."""

    def __init__(self):
        self.clock, mirror = VirtualClock(), Mirror(ReachConfig())
        self.camera = FakeCamera(self.clock, fps=30.0)

        def connect(start):
            settings = {"mjcf": mirror.mjcf, "joints": mirror.joints, "start": start.tolist()}
            return LocalLink(Twin(TwinConfig(**settings), self.clock), SAFETY)

        body = CameraObservations(mirror, {"front": Watched(self.camera, frozen_after=3)}, self.clock, oldest_s=0.2)
        self.env = RobotEnv(body, each_anew(connect))
        self.obs = [self.env.reset(seeds=[1])]
        self.zero = torch.zeros(1, self.env.spec.action.dim)

    def step(self):
        self.obs.append(self.env.step(self.zero).obs)


def test_a_robot_sees():
    seen = Seen()
    for _ in range(5):
        seen.step()
    for obs in seen.obs:
        assert seen.env.spec.obs.check(obs) == 1 and obs["image.front"].dtype == torch.uint8
        assert obs["image.front"].shape == (1, 3, 48, 64) and obs["state"].dtype == torch.float32
    pictures = [obs["image.front"] for obs in seen.obs]
    # A tick is 50 ms, and a picture comes every 33 ms.
    assert not any(torch.equal(a, b) for a, b in pairwise(pictures))
    assert torch.equal(pictures[-1][0].permute(1, 2, 0), torch.from_numpy(seen.camera._image))
    seen.env.close()


@pytest.mark.parametrize("how", ["silent", "frozen"])
def test_who_sees_nothing_new_does_not_go_on(how):
    """The last picture is good for four ticks; of a frozen one it takes three more to be told."""
    seen = Seen()
    seen.step()
    setattr(seen.camera, how, True)
    began_ns = seen.clock.now_ns()
    with pytest.raises(StaleState, match="front"):
        for _ in range(50):
            seen.step()
    assert seen.clock.now_ns() - began_ns < (0.25 if how == "silent" else 0.5) * 1e9
    link = seen.env.link
    link.wait_until_ns(seen.clock.now_ns() + 10**9)
    assert link.state().rung is not Rung.RUN and np.abs(link.state().qd).max() < 0.01
    seen.env.close()


def test_a_robot_can_be_recorded_like_any_world():
    real = robot(ReachConfig(max_steps=10))
    world = make_env(ReachConfig(max_steps=10), 1)
    episodes = collect(real, Replayed(torch.zeros(10, world.spec.action.dim)), evaluation_seeds(2))
    assert [len(e.action) for e in episodes.episodes] == [10, 10]
    real.close()


def test_what_a_mirror_cannot_know_is_refused():
    with pytest.raises(BurnishError, match="things move that a robot's joints do not tell about"):
        Mirror(PushConfig())
    with pytest.raises(BurnishError, match="no task of the desktop arm"):
        Mirror(TwoModeConfig())


def test_a_robot_that_is_stopped_ends_the_episode():
    real = robot(ReachConfig(), supervisor=Scripted(lambda obs, tick: Word(stop=tick == 3)))
    real.reset(seeds=[1])
    zero = torch.zeros(1, real.spec.action.dim)
    steps = [real.step(zero) for _ in range(4)]
    assert [bool(s.truncated) for s in steps] == [False, False, False, True]
    assert not bool(steps[-1].info["held"]) and real.link.state().rung is Rung.STOPPED
    real.reset(seeds=[2])
    assert real.link.state().phase is Phase.ACTIVE, "the next episode begins anew"
    real.close()


@pytest.mark.parametrize("how", ["space", "fault"])
def test_the_row_of_a_stop_says_that_the_arm_was_to_stay(how):
    """The episode ends where the robot begins to brake, and nothing is kept of a request that was not played."""
    person = Scripted(lambda obs, tick: Word(stop=how == "space" and tick == 3))
    real = robot(ReachConfig(action=ActionMode.joint_target), supervisor=person, velocity=1.0, acceleration=2.0)
    real.reset(seeds=[1])
    link: Any = real.link  # within this process
    want = torch.tensor([real.spec.action.high]).float().clone()
    want[0, 1:] = torch.from_numpy(real.link.state().sent[1:]).float()
    want[0, 0] = real.link.state().sent[0] + 0.4
    for tick in range(4):
        if how == "fault" and tick == 3:
            link.loop.robot.ramp("a fault")
        step = real.step(want)
        assert bool(step.truncated) == (not step.info["held"]) == (tick == 3)
        assert tick == 3 or torch.allclose(step.info["executed"], want)
    now = real.link.state()
    assert now.rung is (Rung.STOPPED if how == "space" else Rung.RAMP)
    assert torch.equal(step.info["requested"], want)
    assert step.info["executed"][0].numpy() == pytest.approx(now.sent, abs=1e-6)
    assert abs(now.sent[0] - float(want[0, 0])) > 0.1
    real.close()


def test_somebody_takes_over_and_says_how_it_went():
    def says(obs, tick):
        if tick == 5:
            return Word(success=True)
        return Word(action=np.array([1.0, 0, 0, 0])) if tick in (2, 3) else NOTHING

    real = robot(InsertConfig(), supervisor=Scripted(says))
    real.reset(seeds=[1])
    steps = [real.step(torch.zeros(1, 4)) for _ in range(6)]
    assert [bool(s.info["intervened"]) for s in steps] == [False, False, True, True, False, False]
    assert steps[2].info["executed"][0, 0] == pytest.approx(real.spec.action.high[0])
    assert (steps[2].info["requested"] == 0).all() and (steps[1].info["executed"] == 0).all()
    assert bool(steps[-1].terminated) and bool(steps[-1].info["success"]) and steps[-1].reward == 1
    assert not any(bool(s.terminated) for s in steps[:-1])
    real.close()


def limits(velocity: float, acceleration: float, rate_hz: float = 100.0) -> Limits:
    full = np.ones(6)
    return Limits(arm.LOWER, arm.UPPER, velocity * full, acceleration * full, 1 / rate_hz)


def followed(env, world, ticks: int, seed: int = 0) -> np.ndarray:
    """(ticks, N, nu) set-points at the end of each tick, under random actions."""
    generator = torch.Generator().manual_seed(seed)
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    found = []
    for _ in range(ticks):
        env.step(low + (high - low) * torch.rand(env.num_envs, len(low), generator=generator))
        found.append(world.physics.ctrl())
    return np.stack(found)


def test_a_guard_around_worlds_keeps_the_limits_and_can_be_lifted():
    world = make_env(ReachConfig(), 3)
    env = GuardedEnv(world, limits(1.0, 8.0))
    env.reset(seeds=[1, 2, 3])
    sent = followed(env, world, 20)
    assert np.abs(np.diff(sent, axis=0)).max() <= 1.0 / env.spec.control_hz * (1 + 1e-9)
    assert env.step(torch.zeros(3, env.spec.action.dim)).info["guarded"].min() > 0
    free = make_env(ReachConfig(), 3)
    free.reset(seeds=[1, 2, 3])
    assert np.abs(np.diff(followed(free, free, 20), axis=0)).max() > 2.0 / env.spec.control_hz, "nothing was limited"


def test_each_world_has_its_guard_for_itself():
    """Alone or among others, idle or reset between: a world's path is its own, bit for bit."""
    alone_world, world = make_env(ReachConfig(), 1), make_env(ReachConfig(), 3)
    alone, env = GuardedEnv(alone_world, limits(1.0, 8.0)), GuardedEnv(world, limits(1.0, 8.0))
    alone.reset(seeds=[5])
    env.reset(seeds=[4, 5, 6])
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    generator = torch.Generator().manual_seed(1)
    for tick in range(30):
        action = low + (high - low) * torch.rand(3, len(low), generator=generator)
        if tick % 3 == 2:  # the middle world waits, the others go on
            env.step(action, torch.tensor([True, False, True]))
            continue
        if tick == 10:
            env.reset(torch.tensor([True, False, False]), [7, 0, 0])
        a, b = alone.step(action[1:2]), env.step(action)
        assert torch.equal(a.obs["state"][0], b.obs["state"][1]) and torch.equal(a.reward, b.reward[1:2])


def test_a_guarded_world_goes_on_as_it_would_have_gone():
    one, two = (GuardedEnv(make_env(ReachConfig(), 2), limits(1.0, 8.0)) for _ in range(2))
    one.reset(seeds=[1, 2])
    action = torch.tensor(one.spec.action.high).expand(2, -1)
    for _ in range(4):
        one.step(action)
    two.reset(seeds=[8, 9])
    two.load_state_dict(one.state_dict())
    for _ in range(4):
        a, b = one.step(-action), two.step(-action)
        assert torch.equal(a.obs["state"], b.obs["state"])


def test_a_guard_that_does_not_fit_is_one_sentence():
    world = make_env(ReachConfig(), 1)
    with pytest.raises(BurnishError, match=r"at 30 Hz does not divide a tick of 0.05 s .* choices: 20, 40, 80, 100"):
        GuardedEnv(world, limits(1.0, 8.0, rate_hz=30.0))
    with pytest.raises(BurnishError, match="cannot be had at once"):
        GuardedEnv(make_env(ReachConfig(randomize=RandomizeConfig(latency_s=0.01)), 1), limits(1.0, 8.0))
    with pytest.raises(BurnishError, match="2 actuators for a world of 6"):
        small = Limits(-np.ones(2), np.ones(2), np.ones(2), np.ones(2), 0.01)
        GuardedEnv(world, small)
    with pytest.raises(BurnishError, match="no set-points that a guard could stand before"):
        GuardedEnv(make_env("two_mode", 1), limits(1.0, 8.0))


def typed(keys: str):
    reading, writing = os.pipe()
    os.write(writing, keys.encode())
    return os.fdopen(reading), writing


def test_a_keyboard_says_what_is_pressed():
    stream, writing = typed("")
    board = Keyboard(4, stream, told := io.StringIO())
    assert board.poll({}) == NOTHING
    os.write(writing, b"s")
    assert board.poll({}).success is True
    os.write(writing, b"f")
    assert board.poll({}).success is False
    os.write(writing, b"tdd")
    assert np.array_equal(board.poll({}).action, [1, 0, 0, 0])
    os.write(writing, b"aw")
    assert np.array_equal(board.poll({}).action, [-1, -1, 0, 0])
    assert np.array_equal(board.poll({}).action, [0, 0, 0, 0]), "held, and nothing pressed"
    os.write(writing, b"t")
    assert board.poll({}) == NOTHING
    os.write(writing, b" ")
    assert board.poll({}).stop
    os.write(writing, b"\n")
    board.ready("put the peg back")
    said = told.getvalue()
    assert said.count("a d, w s, q e, z x move") == 1 and said.endswith("back, then press Enter\n")
    os.write(writing, b"\n")
    board.ready("again")
    assert told.getvalue().count("move") == 1, "the keys are told once"
    os.close(writing)
    with pytest.raises(Refused, match="nobody is at the keyboard"):
        board.ready("put the peg back")
    board.close()


@pytest.mark.parametrize("coordinates", [1, 7, 8, 29])
def test_a_keyboard_stops_a_robot_of_any_size(coordinates: int):
    """It moves the first seven coordinates; the others stay."""
    stream, writing = typed("t]")
    board = Keyboard(coordinates, stream, told := io.StringIO())
    action = board.poll({}).action
    assert action is not None and action.shape == (coordinates,)
    assert action.tolist() == [float(i == 6) for i in range(coordinates)]
    for keys in (b" ", b"s ", b"td f"):  # with whatever else is pressed at the same time
        os.write(writing, keys)
        assert board.poll({}).stop
    os.write(writing, b"\n")
    board.ready("begin")
    assert ("the first 7 of" in told.getvalue()) == (coordinates > 7)
    os.close(writing)


def test_a_gamepad_says_what_is_pressed(tmp_path):
    path = tmp_path / "js0"
    os.mkfifo(path)
    pad = Gamepad(4, path)
    writing = os.open(path, os.O_WRONLY)

    def event(kind: int, number: int, value: int) -> None:
        os.write(writing, struct.pack("<IhBB", 0, value, kind, number))

    event(0x81, 0, 1)  # what was pressed when the pad was opened is no news
    assert pad.poll({}) == NOTHING
    event(2, 0, 32767)
    assert pad.poll({}) == NOTHING, "nobody holds the button for taking over"
    event(1, 4, 1)
    event(2, 1, -32768)
    event(2, 3, 1000)
    assert np.array_equal(pad.poll({}).action, [1, -1, 0, 0])
    event(1, 4, 0)
    event(1, 1, 1)
    assert pad.poll({}).success is False
    event(1, 2, 1)
    assert pad.poll({}).stop
    event(1, 0, 0)
    event(1, 0, 1)
    began = time.monotonic()
    pad.ready("put the peg back")
    assert time.monotonic() - began < 5
    pad.close()
    os.close(writing)
    with pytest.raises(Refused, match="no gamepad at"):
        Gamepad(4, tmp_path / "js9")
