"""`burnish deploy` from a bundle and from a server: the same episodes, refusals before anything moves, a server that is
lost; and shadow mode, in which nothing arrives at the robot."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.build import load_policy, saved_policy, weights_of
from burnish.policies.cli.cli import main
from burnish.policies.core.config import to_data
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.lerobot import read_lerobot
from burnish.real_robot import robots
from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.errors import RobotError, StaleState
from burnish.real_robot.export.exporter import ExportConfig, export, source
from burnish.real_robot.export.runtime import ExportedPolicy
from burnish.real_robot.inference import action_sources as acting
from burnish.real_robot.inference.action_sources import BundleConfig, StillWorld, exported
from burnish.real_robot.safety.safe_robot import Safety
from burnish.real_robot.shadow import LOST, Log, ShadowEnv, summary, watch
from burnish.sim import arm
from burnish.sim.build import make_env
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig
from openpi_lab import Drop, openpi
from person_lab import refused
from robot_lab import Puppet
from server_lab import flow, served

pytestmark = [pytest.mark.sim, pytest.mark.real_time]
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
INSERT = make_env("insert", 1).spec
TOLD = PolicySpec(INSERT.obs, INSERT.action, 8, 4, control_hz=INSERT.control_hz, action_mode=INSERT.action_mode)
SHORT = ["env=insert", "env.max_steps=6", "realtime=false", "compare=false", "episodes=1"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "bundle"
    export(ExportConfig(str(folder), samples=20), load_policy(BASE)[0], source(saved_policy(BASE), weights_of(BASE)))
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(acting, "REHEARSALS", acting.COLD + 2)


def played(folder: Path, *words: str) -> np.ndarray:
    """All actions of an episode on the twin."""
    assert main(["deploy", *words, *SHORT, f"record={folder}"]) == 0
    (episode,) = read_lerobot(folder)
    return episode.action.numpy()


def test_the_same_episode_from_a_checkpoint_a_bundle_and_a_server(tmp_path, bundle, quick):
    """To 1e-4 of an action's range, 6 mm: programs round differently by 1e-6, and the arm's answer comes back. Another
    seed is three orders of magnitude away."""
    width = np.array(INSERT.action.high) - np.array(INSERT.action.low)
    one = played(tmp_path / "a", f"policy.path={BASE}")
    two = played(tmp_path / "b", "policy=bundle", f"policy.path={bundle}")
    with served(load_policy(BASE)[0]) as server:
        three = played(tmp_path / "c", "policy=remote", f"policy.url={server.url}")
    other = played(tmp_path / "d", "policy=bundle", f"policy.path={bundle}", "seed=1")
    assert np.abs((two - one) / width).max() < 1e-4 and np.abs((three - one) / width).max() < 1e-4
    assert np.abs((other - one) / width).max() > 1e-1


def test_a_bundle_knows_its_world_and_is_measured_before_it_moves(tmp_path, bundle, quick, capfd):
    words = ["policy=bundle", f"policy.path={bundle}", "realtime=false", "episodes=1", f"out={tmp_path / 'out'}"]
    assert main(["deploy", *words]) == 0
    said = capfd.readouterr().out
    assert said.index("answers in") < said.index("on the robot") < said.index("in simulation, the same episodes")
    found = json.loads((tmp_path / "out" / "deploy.json").read_text())
    assert found["world"]["name"] == "insert" and set(found["inference_ms"]) == {"p50", "p99", "first"}


def test_a_look_ahead_changes_nothing(bundle):
    made = exported(BundleConfig(str(bundle)))
    still = StillWorld(Mirror(InsertConfig()))
    obs, controller, everyone = still.reset(), made.make(1), torch.ones(1, dtype=torch.bool)
    controller.reset(everyone, [7])
    path = []
    for _ in range(6):
        ahead = controller.peek(obs)
        path.append(controller.step(obs))
        assert torch.equal(ahead, path[-1])
    controller.reset(everyone, [7])
    controller.step(obs)
    kept = controller.state_dict()
    again = [controller.step(obs) for _ in range(5)]
    controller.load_state_dict(kept)
    assert all(torch.equal(a, controller.step(obs)) for a in again)
    assert torch.equal(torch.stack(again), torch.stack(path[1:])) and not torch.equal(path[0], path[-1])


def answers(seconds: float = 0.0, until: int | None = None, drops: range = range(0)) -> Any:
    """A server's answers: zeros, so late, so many, with connections that break at some of them."""
    asked = []

    def answer(message: dict) -> dict:
        asked.append(time.sleep(seconds))
        if (until is not None and len(asked) > until) or len(asked) in drops:
            raise Drop
        return {"actions": np.zeros(TOLD.chunk_shape, np.float32)}

    return answer


def told(spec: PolicySpec = TOLD) -> dict:
    return {"policy_spec": to_data(spec.to_dict())}


def test_inference_longer_than_a_tick_is_refused_before_anything_moves(bundle, quick, capfd, monkeypatch):
    act = ExportedPolicy.act
    with openpi(answers(seconds=0.06), told()) as server:
        said = refused(capfd, "policy=remote", f"policy.url={server.url}", "env=insert")
        assert "slower than its own control rate" in said
    monkeypatch.setattr(ExportedPolicy, "act", lambda *a, **k: (time.sleep(0.06), act(*a, **k))[1])
    assert "slower than its own" in refused(capfd, "policy=bundle", f"policy.path={bundle}")


def test_a_lost_server_is_one_sentence_and_a_robot_at_rest(quick, capfd):
    rehearsed = acting.COLD + 2
    words = ["policy=remote", "policy.patience_s=0.1", *SHORT]
    with openpi(answers(until=rehearsed + 1), told()) as server:
        said = refused(capfd, *words, f"policy.url={server.url}")
    assert "was lost" in said or "dialled again" in said
    assert said.endswith("the robot was brought to rest")
    with openpi(answers(drops=range(rehearsed + 2, rehearsed + 3)), told()) as server:
        patient = [*words, "policy.patience_s=5", f"policy.url={server.url}"]
        assert main(["deploy", *patient]) == 0, "one that comes back in time is waited for"
        assert len(server.headers) == 2


ACTION = INSERT.action
MISFITS: list[tuple[PolicySpec, str]] = [
    (replace(TOLD, control_hz=10.0), "control_hz=10,"),
    (replace(TOLD, action_mode="joint_target"), "action_mode=joint_target"),
    (replace(TOLD, obs=ObsSpec({"state": (34,)})), "'state' of shape (34,)"),
    (replace(TOLD, obs=ObsSpec({"state": (35,), "image.top": (3, 8, 8)})), "needs the picture 'top'"),
    (replace(TOLD, action=ActionSpec(ACTION.low[:3], ACTION.high[:3])), "acts in 3 dimensions"),
    (replace(TOLD, action=ActionSpec(ACTION.low, (*ACTION.high[:3], 4.58))), "coordinate 3 of its actions"),  # degrees
]


@pytest.mark.parametrize(("spec", "sentence"), MISFITS, ids=[words for _, words in MISFITS])
def test_a_policy_of_another_robot_is_refused(spec, sentence, capfd):
    with openpi(answers(until=0), told(spec)) as server:
        said = refused(capfd, "policy=remote", f"policy.url={server.url}", *SHORT)
        assert sentence in said and ("does not fit this robot" in said) != ("cameras.top.source=..." in said)
        assert not server.requests


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["policy=bundle", "policy.path={bundle}", "env=reach"], "does not fit this robot"),
        (["policy=bundle", "policy.path={bundle}/nowhere"], "cannot be opened as a folder"),
        (["policy=remote", "policy.url=127.0.0.1:8000"], "write ws://host:port"),
        (["policy=remote", "policy.url=ws://127.0.0.1:9", "env=insert"], "is it running?"),
        (["policy=bundle", "policy.path={bundle}", "safety.share=2"], "must lie in (0, 1]"),
        (["policy=bundle", "policy.path={bundle}", "shadow=true", "record=x"], "a shadow plays nothing"),
        (["policy=bundle", "policy.path={bundle}", "shadow=true", "robot=feetech"], "needs port and calibration"),
    ],
    ids=str,
)
def test_what_cannot_act_is_one_sentence(words, sentence, bundle, quick, capfd):
    assert sentence in refused(capfd, *(word.format(bundle=bundle) for word in words))


JOINTS = tuple(f"{name}.pos" for name in arm.JOINTS)


@pytest.mark.parametrize("kind", ["bundle", "remote"])
@pytest.mark.parametrize("names", [JOINTS, (JOINTS[5], *JOINTS[1:5], JOINTS[0]), ()], ids=["same", "swapped", "none"])
def test_a_joint_is_not_taken_for_another(kind, names, tmp_path, quick, capfd):
    """Shapes, limits and rate fit, so nothing else would tell."""
    called = {"state": names, "action": names} if names else {}
    limits = ActionSpec((-1.5,) * 6, (1.5,) * 6)
    known = PolicySpec(ObsSpec({"state": (6,)}), limits, 4, 2, control_hz=30, action_mode="joint_target", names=called)
    words = [f"policy={kind}", "env=joints", "env.max_steps=4", "realtime=false", "dry_run=true"]
    with ExitStack() as stack:
        if kind == "bundle":
            export(ExportConfig(str(tmp_path / "bundle"), samples=2), flow(known))
            words.append(f"policy.path={tmp_path / 'bundle'}")
        else:
            words.append(f"policy.url={stack.enter_context(served(flow(known))).url}")
        if names not in (JOINTS, ()):
            said = refused(capfd, *words)
            assert "gripper.pos as number 0 of action" in said and "shoulder_pan.pos: the same numbers in" in said
            return
        capfd.readouterr()
        assert main(["deploy", *words]) == 0
    note = "does not say its names of action and state, so this was not compared"
    assert (note in capfd.readouterr().out) == (names == ())


def test_a_server_has_to_be_told_the_world(capfd):
    with openpi(answers(), told()) as server:
        assert "give env=" in refused(capfd, "policy=remote", f"policy.url={server.url}")


# ---- shadow mode ----


@pytest.mark.parametrize("silent", [True, False], ids=["shadow", "control"])
def test_nothing_arrives_at_a_twin(silent, bundle, quick, tmp_path, monkeypatch, capfd):
    calls = []
    for name in ("_activate", "_write", "_stop"):
        inner = getattr(Twin, name)
        monkeypatch.setattr(Twin, name, lambda *a, name=name, inner=inner: (calls.append(name), inner(*a))[1])
    words = [f"shadow={str(silent).lower()}", f"out={tmp_path}"]
    assert main(["deploy", "policy=bundle", f"policy.path={bundle}", *SHORT, *words]) == 0
    assert (calls == []) == silent, "without shadow=true, commands do arrive"
    if silent:
        rows = [json.loads(line) for line in (tmp_path / "shadow.jsonl").read_text().splitlines()]
        assert len(rows) == 6 and {"q", "wanted", "guarded", "after"} <= set(rows[0])
        found = json.loads((tmp_path / "shadow.json").read_text())
        assert found["ticks"] == 6 and found["guard"]["periods"] == 30 and 0 < found["first_rad"]["max"] < 0.5
        assert capfd.readouterr().out.strip().endswith("nothing was sent")


@pytest.mark.parametrize("silent", [True, False], ids=["shadow", "control"])
def test_nothing_arrives_at_the_servos_of_an_emulated_arm(silent, bundle, quick, monkeypatch):
    chains = []
    make = robots.so101
    monkeypatch.setattr(robots, "so101", lambda *a, **k: chains.append(make(*a, **k)) or chains[-1])
    words = ["robot=so101_emulated", f"shadow={str(silent).lower()}"]
    assert main(["deploy", "policy=bundle", f"policy.path={bundle}", *SHORT, *words]) == 0
    (chain,) = chains
    powered = [servo.get(40) for servo in chain.servos]
    assert (not chain.log and not chain.taken and not any(powered)) == silent


def test_hardware_is_opened_once_and_watched_in_its_own_time(bundle, quick, monkeypatch, capfd):
    body, opened = Mirror(InsertConfig()), []
    settings: dict[str, Any] = {"mjcf": body.mjcf, "joints": list(body.joints)}

    class Opened(Twin):
        def _configure(self) -> None:
            opened.append(self)
            super()._configure()

    monkeypatch.setattr(robots, "make_adapter", lambda name, config: Opened(TwinConfig(**settings)))
    words = ["policy=bundle", f"policy.path={bundle}", "env=insert", "env.max_steps=4", "episodes=2", "shadow=true"]
    began = time.monotonic()
    assert main(["deploy", *words, "robot=plugin", "robot.name=somebodys"]) == 0
    assert time.monotonic() - began > 8 / INSERT.control_hz and len(opened) == 1
    assert opened[0].phase.value == "closed" and "8 ticks were watched" in capfd.readouterr().out


@dataclass
class Plain:
    """Two joints that are what is observed; an action is added to where they are."""

    steps: int = 5
    here: Any = None

    def __post_init__(self):
        limits = ActionSpec((-0.5, -0.5), (0.5, 0.5))
        self.spec = EnvSpec(ObsSpec({"state": (2,)}), limits, 20.0, "joint_step", self.steps)

    def begin(self, seed):
        return np.zeros(2)

    def see(self, q, qd):
        self.q = q

    def follow(self, q):
        self.here = q.copy()

    def observe(self):
        return {"state": self.q[None]}

    def targets(self, action):
        return self.here + action


class Always:
    def __init__(self, *action):
        self.action = torch.tensor([action])

    def reset(self, mask, seeds=None): ...

    def step(self, obs):
        return self.action


class Moved(Puppet):
    """By its own program: so far with every state."""

    program = (0.0, 0.0)

    def _state(self):
        self.q = self.q + np.array(self.program)
        return super()._state()


def watched(program, asked, steps=5, **script) -> tuple[Log, Moved]:
    robot, log = Moved(VirtualClock()), Log()
    robot.program = program
    for name, value in script.items():
        setattr(robot.script, name, value)
    env = ShadowEnv(Plain(steps), lambda start: robot, True, Safety(), log)
    watch(env, env, Always(*asked), [3], lambda: False)
    return log, robot


def test_the_numbers_of_a_shadow_are_those_of_what_happened():
    log, robot = watched((0.0, 0.0), (0.3, 0.0))
    found = summary(log)
    assert set(robot.calls) == {"configure", "read", "close"}
    assert found["first_rad"]["max"] == found["away_rad"]["max"] == pytest.approx(0.3, abs=1e-6)
    assert found["moved_rad"]["max"] == 0 and found["agreement"] == {"ticks": 0, "cosine": None}
    # From rest, 10 rad/s^2 for one tick of 0.05 s: 1 + ... + 5 steps of 1 mrad, and the rest is what it is behind.
    assert found["guard"]["furthest_rad"] == pytest.approx(0.3 - 0.015, abs=1e-6)
    assert found["guard"]["changed"] > 0 and found["guard"]["kinds"]["acceleration"] > 0
    with_it, against = (summary(watched((0.01, 0.0), (x, 0.0))[0]) for x in (0.01, -0.01))
    assert with_it["agreement"]["cosine"] == pytest.approx(1) and against["agreement"]["cosine"] == pytest.approx(-1)
    assert with_it["moved_rad"]["median"] == pytest.approx(0.01) and with_it["agreement"]["ticks"] == 5
    assert summary(watched((0.0, 0.0), (0.0, 0.0))[0])["guard"]["changed"] == 0, "who asks for nothing is not changed"


def test_a_silent_robot_ends_the_shadow():
    log, robot = Log(), Moved(VirtualClock())
    env = ShadowEnv(Plain(2 * LOST), lambda start: robot, True, Safety(), log)
    env.reset(None, [1])
    robot.script.fails["read"] = StaleState("nothing came")
    for _ in range(LOST - 1):
        env.step(torch.zeros(1, 2))
    with pytest.raises(RobotError, match="has said nothing for 20 ticks"):
        env.step(torch.zeros(1, 2))
    assert log.stale == LOST
