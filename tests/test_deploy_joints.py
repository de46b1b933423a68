"""`burnish deploy env=joints` with cameras, from a recording of somebody else's to an arm that moves: the set in
LeRobot's degrees, imitation, the driver, the vendor's SDK, servos with a model behind them, a camera that is a film."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.policies.cli.cli import main
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.data.lerobot_writer import write_lerobot
from burnish.real_robot.drivers.calibration import QUANTUM_RAD
from burnish.real_robot.recorder import read_beside
from burnish.sim import arm
from openpi_lab import openpi
from person_lab import Place, refused, someone

pytestmark = [pytest.mark.sim, pytest.mark.slow, pytest.mark.real_time]
HEIGHT, WIDTH, HZ, TICKS = 24, 32, 20, 40
# Degrees, and the gripper in percent: where the recorded arm went where it saw a bright picture, and a dark one.
BRIGHT, DARK = np.array([30.0, -25, 25, 20, -30, 75]), np.array([-30.0, 20, -25, -20, 30, 20])
AHEAD = 8.0  # so far ahead were its set-points


# A machine that is busy lets a policy wait for a second, and servos fall behind: none of that is looked at here.
PATIENT = ["safety.share=0.4", "safety.following_s=3", "safety.silent_ramp_s=5", "safety.stale_ramp_s=2"]


def near(there: np.ndarray, bright: bool) -> bool:
    """In every joint two thirds of the way from the one to the other at least: what imitation and gravity leave over is
    up to 11 of 40 to 60."""
    goal, other = (BRIGHT, DARK) if bright else (DARK, BRIGHT)
    return bool((np.abs(there - goal) < np.abs(there - other) / 2).all())


def picture(rng: np.random.Generator, bright: bool) -> np.ndarray:
    noise = rng.integers(0, 60, (3, HEIGHT, WIDTH), np.uint8)
    return noise + np.uint8(180) if bright else noise


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """Imitates a set that says nothing of Burnish: degrees at 20 Hz, with a camera."""
    folder = tmp_path_factory.mktemp("joints")
    rng = np.random.default_rng(0)
    spec = EnvSpec(
        ObsSpec({"state": (6,), "image.front": (3, HEIGHT, WIDTH)}),
        ActionSpec((-100.0,) * 6, (100.0,) * 6),
        float(HZ),
        "unknown",
        TICKS,
    )
    episodes = []
    for number in range(24):
        bright = number % 2 == 0
        goal = BRIGHT if bright else DARK
        way = [rng.uniform(-40, 40, 6) + np.array([0, 0, 0, 0, 0, 45])]
        asked = []
        for _ in range(TICKS):
            asked.append(way[-1] + np.clip(goal - way[-1], -AHEAD, AHEAD))
            way.append(way[-1] + 0.4 * (asked[-1] - way[-1]))
        frames = np.stack([picture(rng, bright) for _ in range(TICKS + 1)])
        episodes.append(
            Episode(
                obs={
                    "state": torch.tensor(np.array(way), dtype=torch.float32),
                    "image.front": torch.from_numpy(frames),
                },
                action=torch.tensor(np.array(asked)).float(),
                reward=torch.zeros(TICKS),
                terminated=False,
                truncated=True,
                success=False,
                seed=number,
            )
        )
    write_lerobot(Episodes(episodes, spec), folder / "set")
    info = json.loads((folder / "set" / "meta" / "info.json").read_text())
    del info["burnish"]
    (folder / "set" / "meta" / "info.json").write_text(json.dumps(info))
    assert read_lerobot(folder / "set").spec.action_mode == "unknown"
    words = [
        f"data={folder / 'set'}",
        f"out={folder / 'bc'}",
        "policy=gaussian",
        "train.steps=1000",
        "train.batch=64",
        "threads=1",
    ]
    assert main(["pretrain", *words, "chunk.horizon=4", "chunk.execute=2"]) == 0
    return folder / "bc"


def film(require, path: Path, bright: bool) -> str:
    """Of a camera that lies on its side and has twice as many pixels."""
    cv2, rng = require("cv2"), np.random.default_rng(1)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 30.0, (2 * HEIGHT, 2 * WIDTH))
    require(writer.isOpened(), "this OpenCV writes no films")
    for _ in range(600):
        upright = picture(rng, bright).transpose(1, 2, 0).repeat(2, 0).repeat(2, 1)
        writer.write(np.ascontiguousarray(np.rot90(upright)))
    writer.release()
    return str(path)


def eyes(path: str) -> list[str]:
    settings = {"source": path, "pace_hz": 30, "turn": 90, "oldest_s": 2.0}  # a busy machine is late with films
    return [f"cameras.front.{name}={x}" for name, x in settings.items()]


@pytest.mark.parametrize("bright", [True, False])
def test_the_emulated_arm_goes_where_the_picture_says(policy, require, tmp_path, bright: bool):
    require("scservo_sdk")
    words = ["robot=so101_emulated", "env=joints", "env.units=deg", "env.percent=[gripper]", f"env.max_steps={4 * HZ}"]
    seen = eyes(film(require, tmp_path / "film.avi", bright))
    out = [f"out={tmp_path}", f"record={tmp_path / 'set'}", "episodes=1"]
    assert main(["deploy", f"policy.path={policy}", *words, *seen, *out, *PATIENT]) == 0
    (episode,) = read_lerobot(tmp_path / "set")
    assert episode.obs["image.front"].shape[1:] == (3, HEIGHT, WIDTH)
    assert (float(episode.obs["image.front"].float().mean()) > 128) == bright
    assert near(episode.obs["state"][-1].numpy(), bright) and not near(episode.obs["state"][0].numpy(), bright)
    found = json.loads((tmp_path / "deploy.json").read_text())
    assert "simulation" not in found and "success_rate" not in found["robot"], "nobody knows how it went"


@pytest.mark.parametrize("chunks", [[], ["chunks=queue"]], ids=["waits", "queue"])
def test_somebodys_server_moves_the_arm(require, tmp_path, chunks: list[str]):
    """One that says nothing of itself, as openpi's: names, prompt, degrees and the size of pictures are ours to say."""
    require("scservo_sdk")

    def answer(message: dict) -> np.ndarray:
        bright = message["observation/image"].mean() > 128
        here, goal = message["observation/state"], BRIGHT if bright else DARK
        return here + np.clip(goal - here, -AHEAD, AHEAD) * np.linspace(0.5, 1, 8)[:, None]

    words = ["robot=so101_emulated", "env=joints", "env.units=deg", "env.percent=[gripper]", f"env.max_steps={4 * HZ}"]
    words += [f"env.control_hz={HZ}", "policy.prompt=tidy up", "policy.execute=4", "cameras.front.size=[24,32]"]
    words += ["policy.keys={state:observation/state,image.front:observation/image}", "policy.timeout_s=5"]
    seen = eyes(film(require, tmp_path / "film.avi", True))
    with openpi(answer) as server:
        out = [f"record={tmp_path / 'set'}", "episodes=1"]
        assert (
            main(["deploy", "policy=remote", f"policy.url={server.url}", *words, *seen, *out, *chunks, *PATIENT]) == 0
        )
    assert all(set(x) == {"observation/state", "observation/image", "prompt"} for x in server.requests)
    assert server.requests[-1]["observation/image"].shape == (HEIGHT, WIDTH, 3)
    (episode,) = read_lerobot(tmp_path / "set")
    assert near(episode.obs["state"][-1].numpy(), True) and not near(episode.obs["state"][0].numpy(), True)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    """Five joints and a gripper, calibrated by LeRobot."""
    names = arm.JOINTS
    ends = np.rint(2048 + np.stack([arm.LOWER, arm.UPPER], axis=1) / QUANTUM_RAD).astype(int).tolist()
    half = {name: min(2048 - low, high - 2048) for name, (low, high) in zip(names, ends, strict=True)}
    rows = {
        # LeRobot's zero is in the middle of the range, and this arm's there where its servos are in mid-turn.
        name: {"range_min": 2048 - half[name], "range_max": 2048 + half[name]}
        for name in names[:-1]
    } | {"gripper": {"range_min": ends[-1][0], "range_max": ends[-1][1]}}
    measured = {name: {"id": i + 1, "drive_mode": 0, "homing_offset": 0, **rows[name]} for i, name in enumerate(names)}
    with someone(tmp_path, monkeypatch, measured) as place:
        yield place


def test_an_arm_that_lerobot_has_calibrated(policy, place, require, tmp_path):
    """On its port, with somebody beside it, who takes over, moves it, and says that it was well."""
    place.keys = {2 * HZ: "t", 2 * HZ + 2: "d", 2 * HZ + 4: "t", 2 * HZ + 6: "s"}
    seen = eyes(film(require, tmp_path / "film.avi", True))
    words = ["env=joints", "env.units=deg", f"env.max_steps={5 * HZ}", "episodes=1", "supervisor=keyboard"]
    out = [f"out={tmp_path}", f"record={tmp_path / 'set'}"]
    assert main(["deploy", f"policy.path={policy}", *words, *seen, *out, *place.words(), *PATIENT]) == 0
    assert json.loads((tmp_path / "deploy.json").read_text())["robot"]["success_rate"] == 1
    (episode,), (beside,) = read_lerobot(tmp_path / "set"), read_beside(tmp_path / "set")
    held = beside.intervened
    first = int(held.int().argmax())
    assert episode.success and held.any() and not held[:first].any() and not held[-1]
    before, moved = episode.action[first - 1].numpy(), (episode.action[held] - episode.action[first]).numpy()
    low, high = arm.LOWER[0] * 180 / np.pi, arm.UPPER[0] * 180 / np.pi
    assert near(before, True)
    assert np.abs(moved[:, 1:]).max() < 1e-3 and 0 < moved[:, 0].max() < 0.02 * (high - low), "a step, not a swing"
    truth = np.degrees(place.bus.truth())
    low, high = np.degrees(arm.LOWER[-1]), np.degrees(arm.UPPER[-1])
    there = np.append(truth[:5], 100 * (truth[5] - low) / (high - low))
    assert near(there, True), "the arm itself, in its model; its gripper is a channel of its own"


def test_a_person_teaches_an_arm_without_a_task(place, require, tmp_path, capfd):
    """Without a policy: keys move it joint by joint, and what is recorded is learnt from and deployed."""
    place.keys = {0: "t", **dict.fromkeys(range(1, 12), "d"), 12: "t", 14: "s"}
    eye = eyes(film(require, tmp_path / "film.avi", True))
    words = ["env=joints", "env.units=deg", f"env.control_hz={HZ}", "episodes=1", *eye]
    before = np.degrees(place.bus.truth())
    assert main(["record", *words, f"out={tmp_path / 'set'}", *place.words(), *PATIENT]) == 0
    (episode,) = (read := read_lerobot(tmp_path / "set"))
    assert (read.spec.action_mode, read.spec.control_hz, read.meta["joints"]["units"]) == ("joint_target", HZ, "deg")
    assert episode.obs["image.front"].shape[1:] == (3, 2 * HEIGHT, 2 * WIDTH), "as the camera has it"
    assert episode.success
    after = np.degrees(place.bus.truth())
    assert after[0] - before[0] > 3 and np.abs(after - before)[1:].max() < 2, "one joint, and the others stay"
    assert np.abs(episode.action[-1].numpy()[:5] - after[:5]).max() < 2
    words = [f"data={tmp_path / 'set'}", f"out={tmp_path / 'bc'}", "policy=gaussian", "threads=1", "train.steps=2"]
    assert main(["pretrain", *words, "train.valid_fraction=0", "chunk.horizon=4", "chunk.execute=2"]) == 0
    joints = [f"policy.path={tmp_path / 'bc'}", "env=joints", "env.units=deg", "dry_run=true", *eye, *place.words()]
    capfd.readouterr()
    assert main(["deploy", *joints]) == 0
    assert "the gripper would be" in capfd.readouterr().out


def test_a_task_on_an_arm_whose_gripper_is_a_channel(place, tmp_path):
    """The base of `insert` commands six joints; here they are five and a gripper."""
    base = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
    words = ["env=insert", "env.max_steps=8", "episodes=1", "compare=false", "supervisor=keyboard"]
    assert main(["deploy", f"policy.path={base}", f"out={tmp_path}", *words, *place.words(), *PATIENT]) == 0
    ((_, there, afterwards),) = place.went
    assert len(there) == 5 and np.abs(afterwards[:5] - there).max() < 0.03
    assert abs(afterwards[5] - arm.PINCH) < 0.03, "and the gripper, where the episode begins"
    (report,) = json.loads((tmp_path / "deploy.json").read_text())["reports"]
    assert report["counts"]["start"] == 1 and not report["counts"].get("fault")


def test_refusals(policy, require, tmp_path, capfd):
    clip = film(require, tmp_path / "film.avi", True)
    first = [f"policy.path={policy}", "robot=twin"]
    joints = [*first, "env=joints", "env.units=deg", "env.percent=[gripper]"]
    assert "env=joints" in refused(capfd, *first)
    assert "cameras.front.source=..." in refused(capfd, *joints)
    assert "sees no picture 'wrist'" in refused(capfd, *joints, "cameras={front:{source:0},wrist:{source:1}}")
    assert "needs source; give cameras.front.source=..." in refused(capfd, *joints, "cameras.front.fps=30")
    assert "has no setting 'sorce'" in refused(capfd, *joints, "cameras.front.sorce=1")
    assert "real time" in refused(capfd, *joints, "cameras.front.source=0", "realtime=false")
    assert "cannot be opened" in refused(capfd, *joints, f"cameras.front.source={tmp_path / 'none.avi'}")
    assert "leave out cameras.front.size" in refused(
        capfd, *joints, f"cameras.front.source={clip}", "cameras.front.size=[8,8]"
    )
    assert "turn=45" in refused(capfd, *joints, "cameras.front.source=0", "cameras.front.turn=45")
    assert "fit='cut'" in refused(capfd, *joints, "cameras.front.source=0", "cameras.front.fit=cut")
    with openpi(lambda message: np.zeros((4, 6))) as server:
        asked = ["policy=remote", f"policy.url={server.url}", "policy.keys={state:observation/state}", "env=joints"]
        said = refused(capfd, *asked, *eyes(clip))
        assert "policy.keys does not name image.front" in said
        said = refused(capfd, *asked, "chunks=realtime")
        assert "takes no prefix" in said or "chunks=queue" in said
    assert "other units" in refused(capfd, *first, "env=joints", "cameras.front.source=0")
