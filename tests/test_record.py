"""`burnish record`: what was executed, what was asked for and who played, as a set that training reads; whole episodes
only, whatever ends the recording, and the same bytes in one go or in several."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot_sets import tree
from verb_lab import refused

import burnish.real_robot.__main__ as verbs
import lerobot_v3_reader
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.types import Step
from burnish.policies.data.episodes import Episode
from burnish.policies.data.lerobot import LeRobotWriter, read_lerobot
from burnish.policies.data.lerobot_sim_state import read_sim_states
from burnish.real_robot.env import RobotEnv
from burnish.real_robot.recorder import Demonstrator, Recorded, columns, read_beside, recording
from burnish.real_robot.supervisor import Keyboard

pytestmark = pytest.mark.sim
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
EXPERT = ["record", "env=reach", "supervisor=expert", "realtime=false", "seed=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "set"
    assert main([*EXPERT, "episodes=4", f"out={out}"]) == 0
    return out


def test_training_reads_what_was_recorded(whole, tmp_path):
    episodes = read_lerobot(whole)
    assert len(episodes) == 4 and all(e.success and e.terminated for e in episodes)
    assert episodes.meta["robot"] == "twin" and episodes.meta["supervisor"] == "clean expert"
    assert set(episodes.spec.obs.shapes) == {"state"}, "what was requested is no observation"
    assert lerobot_v3_reader.read(whole)[-1]["episode_index"] == 3
    small = ["policy.hidden=[8]", "train.batch=8", "train.steps=3", "eval.episodes=1"]
    assert main(["pretrain", "policy=gaussian", *small, f"data={whole}", f"out={tmp_path / 'bc'}"]) == 0
    few = ["method=iql", "steps=3", "batch=8", "eval.episodes=1", "eval.confirm=2"]
    assert main(["offline", *few, f"data={whole}", f"out={tmp_path / 'iql'}"]) == 0


def test_what_was_asked_for_lies_beside_what_was_executed(tmp_path):
    """A policy plays four ticks, then the expert: two different hands, tick by tick."""
    words = ["supervisor=expert", "after=4", "realtime=false", "episodes=2", f"policy.path={BASE}"]
    assert main(["record", *words, f"out={tmp_path / 'set'}"]) == 0
    episodes, beside = read_lerobot(tmp_path / "set"), read_beside(tmp_path / "set")
    assert len(episodes) == len(beside) == 2
    for episode, (requested, intervened) in zip(episodes, beside, strict=True):
        assert requested.shape == episode.action.shape
        assert intervened.tolist() == [t >= 4 for t in range(len(episode))]
        assert torch.equal(requested[:4], episode.action[:4])
        assert (requested[4:] - episode.action[4:]).abs().max() > 1e-4
    frames = lerobot_v3_reader.read(tmp_path / "set")  # which knows nothing of ours
    asked = [row for episode in beside for row in episode.requested.tolist()]
    assert [frame["complementary_info.policy_action"] for frame in frames] == asked
    assert [frame["intervention"] for frame in frames] == [frame["frame_index"] >= 4 for frame in frames]
    assert "notes" not in episodes.meta and not (tmp_path / "set" / "sim_state").exists()


@pytest.mark.slow
def test_in_several_goes_to_the_same_bytes(whole, tmp_path, capfd):
    out = f"out={tmp_path / 'set'}"
    assert main([*EXPERT, "episodes=2", out]) == 0
    assert "exists already" in refused(capfd, *EXPERT, "episodes=4", out)
    before = tree(tmp_path / "set")
    assert "more than episodes=1" in refused(capfd, *EXPERT, "episodes=1", out, "resume=true")
    for changed in ("seed=4", "level=noisy", "env.max_steps=50"):
        assert "cannot continue it" in refused(capfd, *EXPERT, "episodes=4", out, "resume=true", changed)
    assert tree(tmp_path / "set") == before
    assert main([*EXPERT, "episodes=2", out, "resume=true"]) == 0
    assert "nothing is recorded" in capfd.readouterr().out
    assert main([*EXPERT, "episodes=4", out, "resume=true"]) == 0
    assert tree(tmp_path / "set") == tree(whole)


@pytest.mark.parametrize("kind", [signal.SIGINT, KeyboardInterrupt], ids=["once", "twice"])
def test_ctrl_c_costs_the_running_episode_and_no_other(kind, whole, tmp_path, monkeypatch, capfd):
    poll, first = Demonstrator.poll, len(read_lerobot(whole)[0])
    count = []

    def pressed(self, obs):
        count.append(1)
        if len(count) == first + 3:
            if kind is KeyboardInterrupt:
                raise KeyboardInterrupt
            signal.raise_signal(kind)
        return poll(self, obs)

    with monkeypatch.context() as patch:
        patch.setattr(Demonstrator, "poll", pressed)
        assert main([*EXPERT, "episodes=4", f"out={tmp_path / 'set'}"]) == 130
    said = capfd.readouterr().out
    assert kind is KeyboardInterrupt or "stopped after 1 of 4 episodes; continue with resume=true" in said
    assert len(read_lerobot(tmp_path / "set")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert main([*EXPERT, "episodes=4", f"out={tmp_path / 'set'}", "resume=true"]) == 0
    assert tree(tmp_path / "set") == tree(whole)


def test_ctrl_c_that_stops_the_robot_first_leaves_no_fragment(whole, tmp_path, monkeypatch):
    """A terminal tells the control process as well: within one tick the robot stops and the episode ends."""
    step, begin, first = RobotEnv.step, Demonstrator.begin, len(read_lerobot(whole)[0])
    ticks, begun = [], []

    def stopping(self, action, active=None):
        ticks.append(1)
        if len(ticks) == first + 3:
            signal.raise_signal(signal.SIGINT)
            self.link.stop()
        return step(self, action, active)

    monkeypatch.setattr(RobotEnv, "step", stopping)
    monkeypatch.setattr(Demonstrator, "begin", lambda self, seed: begun.append(seed) or begin(self, seed))
    assert main([*EXPERT, "episodes=4", f"out={tmp_path / 'set'}"]) == 130
    (episode,) = read_lerobot(tmp_path / "set")
    assert episode.success and len(begun) == 2


class Typed(Keyboard):
    """Somebody whose keys are known before."""

    keys = ("t", "dw", "", "a", "ts")  # while somebody holds the robot, s is a direction

    def __init__(self, coordinates: int) -> None:
        super().__init__(coordinates, io.StringIO("\n\n"), io.StringIO())
        self._left: list[str] = []

    def ready(self, what: str) -> None:
        super().ready(what)
        self._left = list(self.keys)

    def _keys(self) -> str:
        return self._left.pop(0) if self._left else ""


def test_a_person_plays_and_says_how_it_went(tmp_path, monkeypatch):
    monkeypatch.setattr(verbs, "Keyboard", Typed)
    words = ["record", "env=insert", "realtime=false", "episodes=2", f"out={tmp_path / 'set'}"]
    assert main(words) == 0
    episodes, beside = read_lerobot(tmp_path / "set"), read_beside(tmp_path / "set")
    x, y = (episodes.spec.action.high[i] for i in (0, 1))
    for episode, (requested, intervened) in zip(episodes, beside, strict=True):
        expected = [[0, 0], [x, -y], [0, 0], [-x, 0]]
        assert np.allclose(episode.action[:4, :2], expected, atol=1e-7) and intervened.tolist() == [True] * 4 + [False]
        assert episode.success and episode.terminated and episode.reward[-1] == 1 and len(episode) == 5
        assert (requested == 0).all(), "nobody asked for anything"
    monkeypatch.setattr(Typed, "keys", ("t", "d", "tf"))
    assert main([*words, "resume=false", f"out={tmp_path / 'other'}"]) == 0
    assert not any(episode.success for episode in read_lerobot(tmp_path / "other"))


def test_keys_move_the_joints_where_an_action_is_a_joint_angle(tmp_path, monkeypatch):
    """And a key that is let go leaves them where they are: not in the middle of their ranges."""
    monkeypatch.setattr(Typed, "keys", ("t", "d", "", "", "ts"))
    monkeypatch.setattr(verbs, "Keyboard", Typed)
    words = ["record", "env=reach", "env.action=joint_target", "realtime=false", "episodes=1"]
    assert main([*words, f"out={tmp_path / 'set'}"]) == 0
    (episode,) = (read := read_lerobot(tmp_path / "set"))
    low, high = (torch.tensor(x) for x in (read.spec.action.low, read.spec.action.high))
    step = 0.1 / read.spec.control_hz * (high - low)[0]
    begins = episode.action[0]
    assert (begins - (low + high) / 2).abs().max() > 0.3, "the control: it does not begin in the middle"
    moved = episode.action - begins
    assert torch.allclose(moved[1:, 0], step, atol=1e-4) and moved[:, 1:].abs().max() < 1e-4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["supervisor=expert", "robot=feetech"], "a script is nobody beside it"),
        (["supervisor=expert", "env=joints"], "nobody is an expert of it"),
        (["supervisor=parrot"], "choices: keyboard, gamepad, expert"),
        (["supervisor=gamepad", "gamepad=/dev/input/js77"], "no gamepad at"),
        (["supervisor=expert", "after=3"], "takes over from a policy"),
        (["supervisor=expert", "level=perfect"], "no expert of level 'perfect'"),
        (["episodes=0"], "must be at least 1"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_one_sentence(words, sentence, tmp_path, capfd):
    assert sentence in refused(capfd, "record", "env=reach", "realtime=false", f"out={tmp_path / 'set'}", *words)
    assert not (tmp_path / "set").exists()


def test_nobody_knows_the_world(tmp_path, capfd):
    assert "nobody says which world" in refused(capfd, "record", "supervisor=expert", f"out={tmp_path / 'set'}")


SPEC = EnvSpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "steps", 3)


class Counting:
    """Answers in the same memory again and again, clips what is asked of it, and ends after three ticks."""

    num_envs, device, spec = 1, torch.device("cpu"), SPEC

    def reset(self, mask=None, seeds=None):
        self.obs = {"state": torch.zeros(1, 1)}
        return self.obs

    def step(self, action, active=None):
        self.obs["state"] += 1
        over = self.obs["state"][0] >= 3
        info = {"executed": action.clamp(-1, 1), "requested": action, "intervened": torch.tensor([False])}
        return Step(self.obs, torch.ones(1), torch.tensor([False]), over, info)


def test_an_episode_that_is_cut_short_is_forgotten(tmp_path):
    with LeRobotWriter(tmp_path / "set", SPEC, extra=columns(1)) as writer:
        env = Recorded(Counting(), writer)
        for seed, ticks in ((5, 2), (6, 3), (7, 1)):
            env.reset(None, [seed])
            for _ in range(ticks):
                env.step(torch.tensor([[2.0]]))
        with pytest.raises(BurnishError, match="together with its seed"):
            env.reset()
    (episode,) = read_lerobot(tmp_path / "set")
    assert episode.seed == 6 and episode.truncated and not episode.success
    assert episode.obs["state"][:, 0].tolist() == [0, 1, 2, 3] and episode.action[:, 0].tolist() == [1, 1, 1]
    (beside,) = read_beside(tmp_path / "set")
    assert beside.requested[:, 0].tolist() == [2, 2, 2] and not beside.intervened.any()


def collected(tmp_path: Path, **state: torch.Tensor) -> Path:
    """A set of `burnish collect`, of one episode, with the simulator's state where there is one."""
    with LeRobotWriter(tmp_path / "set", SPEC, robot_type="twin") as writer:
        action, ends = torch.zeros(3, 1), {"terminated": False, "truncated": True, "success": False, "seed": 0}
        writer.add(Episode({"state": torch.zeros(4, 1)}, action, action[:, 0], **ends, sim_state=state or None))
    return tmp_path / "set"


@pytest.mark.parametrize("states", [{}, {"qpos": torch.zeros(4, 2)}], ids=["nothing", "a simulator's state"])
def test_a_set_without_them_is_one_sentence(states, tmp_path):
    folder = collected(tmp_path, **states)
    with (
        pytest.raises(BurnishError, match="cannot continue it"),
        recording(Counting(), str(folder), {}, "twin", [0, 1], resume=True),
    ):
        pass
    with pytest.raises(BurnishError, match="holds nothing beside its actions: `burnish record` did not write it"):
        read_beside(folder)
    with pytest.raises(BurnishError, match="is not a LeRobot dataset"):
        read_beside(tmp_path)


@pytest.mark.parametrize(
    ("wide", "sentence"), [(2, "5 bytes, but 9 are described"), (2**31 - 1, "more than fit in memory")]
)
def test_sizes_that_a_set_promises_are_not_believed(wide, sentence, tmp_path):
    folder = collected(tmp_path, qpos=torch.zeros(4, 1), held=torch.zeros(4, dtype=torch.bool))
    info = json.loads((folder / "meta/info.json").read_text())
    info["burnish"]["sim_state"]["tensors"][0]["shape"] = [wide]
    info["total_frames"] = 3 if wide == 2 else 10**6
    (folder / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(BurnishError, match=sentence):
        read_sim_states(folder)
