"""`burnish data`: sets described, measured, examined, shown, converted and merged, where the answers are known."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from test_lerobot import assert_same, drop_from_info, edit_info, make_episodes

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.rewards import RewardConfig
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.wrapper import feature_names
from burnish.policies.data import convert, stats
from burnish.policies.data.coverage import coverage, quality
from burnish.policies.data.episodes import NO_LIMITS, Episode, Episodes
from burnish.policies.data.lerobot import LeRobotWriter, read_lerobot, write_lerobot
from burnish.policies.data.lerobot_sim_state import read_sim_state
from burnish.policies.external.reward_models import relabelled
from burnish.sim.build import make_env
from burnish.sim.locomotion.settings import HopperConfig


def recorded(states, actions, **changes) -> Episode:
    states, actions = (torch.as_tensor(x, dtype=torch.float32) for x in (states, actions))
    obs = {"state": torch.cat([states, states[-1:]])}
    facts = {"reward": torch.zeros(len(actions)), "terminated": False, "truncated": True, "success": False, "seed": 0}
    return Episode(obs, actions, **facts | changes)


def in_a_set(*episodes: Episode, low: float = -1.0, high: float = 1.0, **meta) -> Episodes:
    state, action = episodes[0].obs["state"].shape[1], episodes[0].action.shape[1]
    limits = ActionSpec((low,) * action, (high,) * action)
    return Episodes(list(episodes), EnvSpec(ObsSpec({"state": (state,)}), limits, 20.0, "velocity", 10**6), meta)


def draws(frames: int, numbers: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(frames, numbers, generator=torch.Generator().manual_seed(seed)) * 2 - 1


# ---- exploration and exploitation ----


def test_cells_of_a_lattice_are_counted():
    """One number of state and one of action, 100 frames: ten bins each. 37 of the 100 cells are visited."""
    cells = [0, 9, 90, 99, *range(20, 53)]
    chosen = np.resize(cells, 100)
    found = coverage(in_a_set(recorded(chosen[:, None] // 10, (2 * (chosen % 10) + 1)[:, None] / 10 - 1)))
    assert (found.cells, found.bins, found.numbers, found.grids) == (37, 10, 2, 1)
    assert found.reference == pytest.approx(100 * (1 - 0.99**100)) and found.saco == pytest.approx(37 / found.reference)


@pytest.mark.parametrize(("state", "action"), [(2, 1), (20, 6)])
def test_noise_covers_everything_and_a_pose_nothing(state, action):
    """The number of occupied cells has a standard deviation of about 1% here."""
    wide = in_a_set(recorded(draws(2000, state), draws(2000, action, 1)))
    assert coverage(wide).saco == pytest.approx(1, abs=0.04)
    assert coverage(in_a_set(recorded(torch.zeros(2000, state), torch.zeros(2000, action)))).saco < 0.002
    narrow = in_a_set(recorded(draws(2000, state), draws(2000, action, 1) / 8))
    assert coverage(narrow).saco < 0.6
    # Against another set: itself, any half of itself, and one that is more timid.
    half = in_a_set(recorded(draws(2000, state)[:1000], draws(2000, action, 1)[:1000]))
    assert coverage(wide, wide).saco == 1 and coverage(half, wide).saco == pytest.approx(1, abs=0.04)
    assert coverage(narrow, wide).saco < 0.6 < 1.5 < coverage(wide, narrow).saco
    with pytest.raises(BurnishError, match="take one of the same world"):
        coverage(wide, in_a_set(recorded(draws(9, state + 1), draws(9, action))))


def test_quality_lies_between_its_ends():
    assert quality([0.0, 1.0, 5.0])._asdict() == {"tq": 0.4, "mean": 2.0, "worst": 0.0, "best": 5.0}
    assert quality([2.0, 2.0], worst=-2.0, best=8.0).tq == 0.4 and quality([12.0], 0.0, 10.0).tq == 1.2
    assert quality([2.0, 2.0]).tq is None


# ---- what is suspicious ----


def smooth(frames: int = 200, numbers: int = 2) -> torch.Tensor:
    return torch.sin(torch.arange(frames)[:, None] / 30 + torch.arange(numbers))


def changed(x: torch.Tensor, *places, value: float) -> torch.Tensor:
    x = x.clone()
    for place in places:
        x[place] = value
    return x


SUSPICIOUS = {
    "state: state_1 never changes": lambda s, a: [recorded(changed(s, (slice(None), 1), value=3.0), a)],
    "action: 1 of 200 frames are outside of the limits, in action_0": lambda s, a: [
        recorded(s, changed(a, (5, 0), value=1.5))
    ],
    "action: action_0 reaches from": lambda s, a: [recorded(s, changed(a / 100, (5, 0), value=0.9))],
    "action: action_1 takes the values -1 and 1 alone": lambda s, a: [
        recorded(s, torch.stack([a[:, 0], a[:, 1].sign()], 1))
    ],
    "state: state_0 jumps 2 times, by 4": lambda s, a: [recorded(changed(s, (77, 0), value=5.0), a)],
    "about a full turn": lambda s, a: [
        recorded(torch.cat([(torch.arange(200) / 20 + 3).remainder(2 * torch.pi)[:, None], s], 1), a)
    ],
    "100 of 199 frames repeat the one before": lambda s, a: [recorded(s[::2].repeat_interleave(2, 0), a)],
    "1 of 3 episodes repeat another one": lambda s, a: [recorded(s, a), recorded(s + 0.01, a), recorded(s, a)],
}


@pytest.mark.parametrize("sentence", SUSPICIOUS)
def test_what_is_suspicious_is_said(sentence):
    said = list(stats.suspicions(in_a_set(*SUSPICIOUS[sentence](smooth(), draws(200, 2)))))
    assert any(sentence in line for line in said) and len(said) == 1, said


def test_good_data_is_not_suspicious():
    assert list(stats.suspicions(in_a_set(recorded(smooth(), draws(200, 2))))) == []


# ---- the verbs ----


@pytest.fixture
def ours(tmp_path):
    """Five episodes of every kind of observation, two tasks."""
    names = {"state": ["hip", "knee", "\x1b[31mfoot"], "action": ["x", "y"]}
    return str(write_lerobot(replace(make_episodes(), names=names), tmp_path / "ours"))


@pytest.fixture
def theirs(ours, tmp_path):
    """The same rows as a set from elsewhere: no rewards, no ends, no final observations."""
    folder = tmp_path / "ours"
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    gone = [name for name in table.column_names if name.startswith("next.")]
    pq.write_table(table.drop_columns(gone), path)
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    edit_info(folder, features={name: x for name, x in features.items() if name not in gone}, robot_type="so101")
    drop_from_info(folder, "burnish")
    return str(folder)


def test_info_says_what_a_set_is(ours, capsys):
    assert main(["data", "info", ours]) == 0
    said = capsys.readouterr().out
    texts = ["lerobot v3.0, of the world push", "5, 25 frames at 12.5 Hz", "1 to 9, median 5", "goal_image.front (3 x"]
    texts += ["state (3): hip, knee, \\x1b[31mfoot", "action_mode=ee_delta: x, y", "[-0.1, 0.3], [-2, 2]", "SACo", "TQ"]
    for text in (*texts, "'task 0', 3 episodes", "3 terminated, 2 truncated", "40.0%"):
        assert text in said, text
    assert "\x1b" not in said and "filled in" not in said
    assert main(["data", "info", ours, "json=true", "worst=-10", "best=10", f"reference={ours}"]) == 0
    found = json.loads(capsys.readouterr().out)
    mean = np.mean([float(episode.reward.sum()) for episode in make_episodes()])
    assert found["tq"]["tq"] == pytest.approx((mean + 10) / 20, abs=1e-6) and found["saco"]["saco"] == 1
    assert found["observations"]["state"]["names"][:2] == ["hip", "knee"] and found["lengths"]["max"] == 9


def test_info_says_what_a_reader_filled_in(theirs, capsys):
    assert main(["data", "info", theirs]) == 0
    said = capsys.readouterr().out
    for text in ("no reward: it is zero", "which episodes succeed", "how episodes end", "last observation is repeated"):
        assert text in said
    for name in ("success ", "returns ", "exploitation TQ "):
        assert any(line.startswith(name) and "unknown" in line for line in said.splitlines())


def test_stats_are_those_of_the_columns(ours, capsys):
    assert main(["data", "stats", ours, "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)["features"]
    state = torch.cat([episode.obs["state"][:-1] for episode in make_episodes()]).double().numpy()
    for name, values in (("mean", state.mean(0)), ("std", state.std(0)), ("q99", np.quantile(state, 0.99, axis=0))):
        np.testing.assert_allclose(found["state"][name], values, rtol=1e-6, atol=1e-9)
    assert main(["data", "stats", ours]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["feature", *stats.SHOWN] and [row[:2] for row in rows if row[0] == "action"][1] == [
        "action",
        "y",
    ]


def test_a_converted_set_has_the_chosen_rows(ours, tmp_path, capsys):
    whole = read_lerobot(ours)
    assert main(["data", "convert", ours, f"out={tmp_path / 'all'}"]) == 0
    assert_same(read_lerobot(tmp_path / "all"), whole)
    assert read_lerobot(tmp_path / "all").names == whole.names
    words = ["episodes=1:3,0", "success=true", "keys=goal,image.front"]
    assert main(["data", "convert", ours, f"out={tmp_path / 'some'}", *words]) == 0
    some = read_lerobot(tmp_path / "some")
    assert [episode.seed for episode in some] == [whole[0].seed] and set(some.spec.obs.shapes) == {
        "goal",
        "image.front",
    }
    assert some.names == {"action": ("x", "y")} and some[0].obs["goal"].equal(whole[0].obs["goal"])
    assert "1 episodes, 1 frames, 1 successful" in capsys.readouterr().out


def test_a_converted_set_still_says_what_was_filled_in(theirs, tmp_path):
    """Else zeros that a reader has made up would be learnt from as rewards."""
    assert main(["data", "convert", theirs, f"out={tmp_path / 'set'}"]) == 0
    read = read_lerobot(tmp_path / "set")
    assert_same(replace(read, meta={}), replace(read_lerobot(theirs), meta={}))
    assert read.meta["notes"] == read_lerobot(theirs).meta["notes"] and read.meta["robot_type"] == "so101"
    with pytest.raises(BurnishError, match="hold no rewards"):
        relabelled(read, RewardConfig())


def test_notes_that_are_none_are_passed_over(ours, capsys):
    info = json.loads(Path(ours, "meta/info.json").read_text())
    info["burnish"]["meta"]["notes"] = 5
    edit_info(Path(ours), burnish=info["burnish"])
    assert main(["data", "info", ours]) == 0 and "filled in" not in capsys.readouterr().out


def test_the_simulators_states_are_kept(tmp_path):
    words = ["collect", "env=point_reach", "env.max_steps=3", "episodes=3", "sim_state=true", f"out={tmp_path / 'a'}"]
    assert main(words) == 0
    assert main(["data", "convert", str(tmp_path / "a"), f"out={tmp_path / 'b'}", "episodes=1:"]) == 0
    one, two = read_sim_state(tmp_path / "a", 2, 1), read_sim_state(tmp_path / "b", 1, 1)
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


def test_an_interrupted_conversion_leaves_nothing(ours, tmp_path, monkeypatch, capsys):
    add, out = LeRobotWriter.add, tmp_path / "new" / "set"

    def interrupted(writer, episode):
        if len(writer.seeds) == 3:
            raise KeyboardInterrupt
        add(writer, episode)

    monkeypatch.setattr(LeRobotWriter, "add", interrupted)
    assert main(["data", "convert", ours, f"out={out}"]) == 130 and list(out.parent.iterdir()) == []
    monkeypatch.undo()
    assert main(["data", "convert", ours, f"out={out}"]) == 0 and len(read_lerobot(out)) == 5
    capsys.readouterr()
    assert main(["data", "convert", ours, f"out={out}"]) == 2 and "exists already" in capsys.readouterr().err


def test_merged_sets_keep_tasks_and_seeds(ours, tmp_path, capsys):
    other = make_episodes(2)
    others = [replace(episode, seed=7 + i, task="another") for i, episode in enumerate(other)]
    write_lerobot(replace(other, episodes=others), tmp_path / "other")
    assert main(["data", "merge", ours, str(tmp_path / "other"), f"out={tmp_path / 'both'}"]) == 0
    both, whole = read_lerobot(tmp_path / "both"), read_lerobot(ours)
    assert_same(replace(both, episodes=both.episodes[:5]), whole)
    assert [(e.seed, e.task) for e in both.episodes[5:]] == [
        (7, "another"),
        (8, "another"),
    ] and both.names == whole.names
    assert "2 of the episodes repeat another one" in capsys.readouterr().out


def like(episodes: Episodes, **changes) -> Episodes:
    return replace(episodes, spec=replace(episodes.spec, **changes))


BASE = in_a_set(recorded(smooth(), draws(200, 2)))
FITTED = {"notes": [NO_LIMITS]}
UNLIKE = {
    "A has observations ['state'], and B ['state', 'w']": replace(
        BASE,
        episodes=[replace(x, obs={**x.obs, "w": x.obs["state"]}) for x in BASE],
        spec=replace(BASE.spec, obs=ObsSpec({"state": (2,), "w": (2,)})),
    ),
    "A has state of shape (2,), and B (3,)": in_a_set(recorded(smooth(200, 3), draws(200, 2))),
    "A has actions of dimension 2, and B 1": in_a_set(recorded(smooth(), draws(200, 1))),
    "A has control_hz 20.0, and B 10.0": like(BASE, control_hz=10.0),
    "A acts with action_mode=velocity, but B with action_mode=torque": like(BASE, action_mode="torque"),
    "A has the names of state ['a', 'b'], and B ['b', 'a']": replace(BASE, names={"state": ["b", "a"]}),
    "A has actions between (-1.0, -1.0) and (1.0, 1.0), and B between (-2.0, -2.0)": replace(
        BASE, spec=in_a_set(*BASE, low=-2.0).spec
    ),
    "B cannot be merged with A: its episode 0 has action 5": in_a_set(
        recorded(smooth(), 5 * torch.ones(200, 2)), high=5.0, **FITTED
    ),
}


@pytest.mark.parametrize("sentence", UNLIKE)
def test_sets_that_differ_are_not_merged(sentence):
    with pytest.raises(BurnishError) as caught:
        convert.merged({"A": replace(BASE, names={"state": ["a", "b"]}), "B": UNLIKE[sentence]})
    assert sentence in str(caught.value)


def test_limits_of_actuators_win_over_those_of_the_data():
    fitted = replace(in_a_set(*BASE, low=-0.99, high=0.99), meta=FITTED, spec=in_a_set(*BASE, low=-0.999).spec)
    both, _ = convert.merged({"A": like(fitted, action_mode="unknown"), "B": BASE})
    assert both.spec.action == BASE.spec.action and both.spec.action_mode == "velocity" and both.meta == FITTED
    wide = replace(fitted, spec=in_a_set(*BASE, low=-3.0).spec)
    assert convert.merged({"A": fitted, "B": wide})[0].spec.action.low == (-3.0, -3.0)


def test_what_not_all_sets_have_is_left_out_and_said():
    rich = replace(BASE[0], extra={"flag": torch.ones(200, 1)}, sim_state={"q": torch.ones(201, 2)})
    metas = [{"env": {"name": name}} for name in "ab"]
    both, said = convert.merged({"A": replace(BASE, meta=metas[0]), "B": replace(BASE, episodes=[rich], meta=metas[1])})
    assert not both[1].extra and both[1].sim_state is None and both.meta == {"merged": metas}
    assert [word in " ".join(said) for word in ("flag", "states are left out", "several worlds")] == [True] * 3


def test_an_episode_is_shown(ours, tmp_path, capsys):
    import av

    assert main(["data", "show", ours, "episode=3", f"out={tmp_path / 'new' / 'e.mp4'}"]) == 0
    said = capsys.readouterr().out
    assert "episode 3: 7 frames at 12.5 Hz" in said and "state hip" in said and "task 'task 1'" in said
    with av.open(str(tmp_path / "new/e.mp4")) as film:
        frames = list(film.decode(video=0))
    assert len(frames) == 8 and (frames[0].width, frames[0].height) == (16, 6), "two cameras, the last one too"
    assert main(["data", "show", ours, f"out={tmp_path / 'e.svg'}"]) == 0
    drawing = (tmp_path / "e.svg").read_text()
    assert drawing.count("<polyline") == 3 + 2 + 1 + 4 + 2 + 1 and "\x1b" not in drawing  # features, actions, reward


def test_names_in_a_drawing_are_text(tmp_path):
    from burnish.policies.data.show import drawing

    text = drawing(replace(BASE, names={"state": ["<b>", "a&b"]}), 0)
    assert "&lt;b&gt;" in text and "a&amp;b" in text and "<b>" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["info"], "data=... must be given"),
        (["info", "A", "B"], "`burnish data info` takes one set"),
        (["merge", "A", "out=x"], "takes two sets or more"),
        (["merge", "A", "A", "out=x"], "stands there twice"),
        (["convert", "A"], "out=... must be given"),
        (["info", "A", "episodes=3"], "has no use for episodes=; it takes reference=, worst=, best=, json="),
        (["convert", "A", "out=x", "episodes=5"], "there are no episodes '5' of 5; write 3, 0:50"),
        (["convert", "A", "out=x", "episodes=a:b"], "there are no episodes 'a:b'"),
        (["convert", "A", "out=x", "episodes=9:"], "none of the 5 episodes is chosen"),
        (["convert", "A", "out=x", "keys=stat"], "did you mean 'state'?"),
        (["show", "A", "episode=5"], "there is no episode 5; the set has 5"),
        (["show", "A", "out=e.gif"], "end it with .mp4 or .svg"),
        (["info", "A/nothing"], "there is no dataset at"),
        (["info", "A", "worst=2", "best=1"], "worst=2 must lie below best=1"),
        (["info", "A", "best=nan"], "best=nan must be a finite number"),
        (["convert", "A", "out=x", "control_hz=0"], "control_hz=0.0 must lie in (0, 10000]"),
    ],
)
def test_mistakes_are_one_sentence(ours, words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *(ours + word[1:] if word[0] == "A" else word for word in words)]) == 2
    assert sentence in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["ours"]


# ---- names ----


def test_worlds_name_their_numbers(tmp_path):
    assert main(["collect", "env=reach", "env.max_steps=2", "episodes=1", f"out={tmp_path / 'set'}"]) == 0
    names = read_lerobot(tmp_path / "set").names
    assert names["state"][0] == "angle shoulder_pan" and names["action"] == ("x", "y", "z")
    names = feature_names(ScaledEnv(make_env(HopperConfig(), 1)))
    joints = ["thigh_joint", "leg_joint", "foot_joint"]
    assert (
        names["state"]
        == [f"{what} {x}" for what in ("position", "speed") for x in ("rootx", "rootz", "rooty", *joints)][1:]
    )
    assert names["action"] == joints


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["a", "b", "c"], ("a", "b", "c")),
        ({"motors": ["a", "b", "c"]}, ("a", "b", "c")),
        (["state_0", "state_1", "state_2"], None),
        (["a", "b"], None),
        (["a", "b", 3], None),
        ({"motors": 3}, None),
        (None, None),
    ],
)
def test_names_of_others_are_read(ours, given, read):
    info = json.loads(Path(ours, "meta/info.json").read_text())
    info["features"]["observation.state"]["names"] = given
    Path(ours, "meta/info.json").write_text(json.dumps(info))
    assert read_lerobot(ours).names.get("state") == read


def test_a_set_without_names_is_continued_with_them(tmp_path):
    episodes = make_episodes()
    write_lerobot(replace(episodes, episodes=episodes.episodes[:2]), tmp_path / "set")
    named = {"state": ["a", "b", "c"]}
    with LeRobotWriter(tmp_path / "set", episodes.spec, episodes.meta, names=named, resume=True) as writer:
        writer.add(episodes[2])
    assert (
        read_lerobot(tmp_path / "set").names == {"state": ("a", "b", "c")} and len(read_lerobot(tmp_path / "set")) == 3
    )
    with pytest.raises(BurnishError, match="cannot continue it"):
        LeRobotWriter(tmp_path / "set", episodes.spec, episodes.meta, names={"state": ["c", "b", "a"]}, resume=True)
    with pytest.raises(BurnishError, match="1 names for the 3 numbers of 'state'"):
        LeRobotWriter(tmp_path / "new", episodes.spec, names={"state": ["a"]})
