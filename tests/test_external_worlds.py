"""Gymnasium's environments as worlds do the same as in Gymnasium, and an unfit one is refused by a sentence."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from verb_lab import refused

from burnish.policies.cli.cli import main
from burnish.policies.core.config import from_data, to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.types import VecEnv
from burnish.sim.external.links import InProcess
from burnish.sim.external.settings import GymConfig, Reward
from burnish.sim.external.worlds import ExternalEnv, cut_seed

BENCH = "burnish_test/Bench-v0"
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
ends_after = itertools.count()  # what a dishonest environment depends on beside its seed


class Bench(gymnasium.Env):
    """Observes whatever space it is given, draws from its own generator in every step, and ends as told.

    Numbers are the sum of all actions plus a random part; images hold the number of the tick.
    """

    metadata: Any = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012

    def __init__(
        self,
        space: spaces.Space = BOX,
        action: spaces.Space = BOX,
        terminates: int = 0,
        limit: int = 0,
        word: str | None = None,
        honest: bool = True,
        render_mode: str | None = None,
    ):
        self.observation_space, self.action_space, self.render_mode = space, action, render_mode
        self.terminates, self.limit, self.word, self.honest = terminates, limit, word, honest
        self.taken: list[Any] = []

    def see(self, space: Any):
        if isinstance(space, spaces.Dict):
            return {key: self.see(inner) for key, inner in list(space.items())[::-1]}
        if space.dtype == np.uint8:
            return np.full(space.shape, self.tick, np.uint8)
        noise = self.np_random.normal(size=space.shape) if self.honest else next(ends_after)
        return (self.pushed + noise * np.ones(space.shape)).astype(space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick, self.pushed = 0, 0.0
        return self.see(self.observation_space), {}

    def step(self, action):
        self.tick, self.pushed = self.tick + 1, self.pushed + float(np.sum(action))
        self.taken.append(action)
        info = {} if self.word is None else {self.word: np.float32(self.tick == self.terminates)}
        return self.see(self.observation_space), 0.1, self.tick == self.terminates, self.tick == self.limit, info

    def render(self):
        return np.full((6, 8, 3), self.tick, np.uint8)


class Silent(Bench):
    metadata: Any = None


@pytest.fixture(autouse=True)
def bench():
    """How the test's own environments are registered: by Python, with spaces that no configuration could name."""

    def register(limit: int | None = 20, nondeterministic=False, **kwargs):
        gymnasium.registry.pop(BENCH, None)
        gymnasium.register(BENCH, Bench, max_episode_steps=limit, nondeterministic=nondeterministic, kwargs=kwargs)

    register()
    yield register
    gymnasium.registry.pop(BENCH, None)


def worlds(num_envs=2, seed=0, **config):
    return ExternalEnv(num_envs, GymConfig(**{"id": BENCH, "processes": 0, **config}), seed=seed)


def inner(env: ExternalEnv) -> Any:
    """The first environment itself, without Gymnasium's wrappers."""
    link = env.workers.links[0]
    assert isinstance(link, InProcess)
    return link._host.worlds[0].unwrapped


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("Pendulum-v1", 17),
        ("MountainCarContinuous-v0", 30),
        pytest.param("Hopper-v5", None, marks=pytest.mark.sim),
        pytest.param("Reacher-v5", None, marks=pytest.mark.sim),
    ],
)
def test_a_world_does_what_the_plain_environment_does(name, limit):
    """Worlds are active in turns and begin anew on other ticks; each follows its own plain environment bit for bit."""
    env = ExternalEnv(3, GymConfig(name, max_steps=limit))
    assert isinstance(env, VecEnv)
    plain = [gymnasium.make(name, max_episode_steps=limit) for _ in range(3)]
    seeds = [5, 2**40, 7]
    expected = torch.stack(
        [torch.as_tensor(p.reset(seed=cut_seed(s))[0]).float() for p, s in zip(plain, seeds, strict=True)]
    )
    assert torch.equal(env.reset(seeds=seeds)["state"], expected)
    source, ended = torch.Generator().manual_seed(0), 0
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    for tick in range(120):
        action = low + torch.rand(3, env.spec.action.dim, generator=source) * (high - low)
        active = torch.tensor([(tick + i) % 3 > 0 for i in range(3)])
        step = env.step(action, active)
        again = torch.zeros(3, dtype=torch.bool)
        for i in active.nonzero()[:, 0].tolist():
            obs, reward, terminated, truncated, _ = plain[i].step(action[i].numpy())
            expected[i] = torch.as_tensor(obs).float()
            assert step.reward[i] == torch.tensor(float(reward)), "rounded to float32 once"
            assert (bool(step.terminated[i]), bool(step.truncated[i])) == (terminated, truncated and not terminated)
            assert torch.equal(step.info["executed"][i], action[i])
            again[i] = terminated or truncated
        assert torch.equal(step.obs["state"], expected), "where the action led, also at an end; idle rows are as before"
        if again.any():
            ended += int(again.sum())
            seeds = [s + 100 for s in seeds]
            for i in again.nonzero()[:, 0].tolist():
                expected[i] = torch.as_tensor(plain[i].reset(seed=cut_seed(seeds[i]))[0]).float()
            assert torch.equal(env.reset(again, seeds)["state"], expected)
    assert ended >= 3, "no end was seen, so nothing about ends was shown"


def test_without_given_seeds_worlds_follow_the_seed_that_they_were_made_with():
    def begin(seed):
        env = worlds(seed=seed)
        return torch.cat([env.reset()["state"] for _ in range(3)])

    assert torch.equal(begin(4), begin(4))
    assert not torch.equal(begin(4), begin(5))
    assert len(begin(4).unique(dim=0)) == 6, "every world and every episode begins elsewhere"


def test_terminated_wins_and_limits_truncate(bench):
    bench(terminates=3, limit=3)
    env = worlds()
    env.reset()
    flags = [env.step(torch.zeros(2, 2))[2:4] for _ in range(3)]
    assert [(bool(t[0]), bool(c[0])) for t, c in flags] == [(False, False), (False, False), (True, False)]
    bench()
    env = worlds(max_steps=2)
    assert env.spec.max_steps == 2 and worlds().spec.max_steps == 20
    env.reset()
    flags = [env.step(torch.zeros(2, 2))[2:4] for _ in range(2)]
    assert [(bool(t[0]), bool(c[0])) for t, c in flags] == [(False, False), (False, True)]
    with pytest.raises(BurnishError, match="stepped after its end"):
        env.step(torch.zeros(2, 2))


def test_the_first_success_may_end_the_episode_and_its_payment(bench):
    bench(terminates=2, word="solved")

    def played(**config):
        env = worlds(1, **config)
        env.reset()
        steps = [env.step(torch.zeros(1, 2)) for _ in range(3)]
        return env, [
            (s.reward.item(), s.terminated.item(), s.info.get("success", torch.zeros(1)).item()) for s in steps
        ]

    bench(terminates=9, word="solved")
    assert played(success="solved")[1] == [(pytest.approx(0.1), False, False)] * 3
    _, paid = played(success="solved", success_reward=None, reward=Reward.until_success)
    assert paid == [(-1.0, False, False)] * 3
    _, paid = played(success_reward=0.05, end_at_success=True, reward=Reward.until_success)
    assert paid[0] == (0.0, True, True), "the step that pays enough is the success"
    bench(terminates=2)
    assert [p[1:] for p in played(success="terminated")[1][:2]] == [(False, False), (True, True)]
    with pytest.raises(BurnishError, match=r"reports none; say how to read it: env\.success=KEY"):
        played(reward=Reward.until_success)
    _, paid = played(id="odd_worlds:Late", kwargs={"at": 3}, max_steps=3, reward=Reward.until_success)
    assert [reward for reward, *_ in paid] == [-1, -1, 0], "reported in the last step alone"


@pytest.mark.parametrize("word", ["success", "is_success", None])
def test_success_is_reported_where_the_environment_reports_it(bench, word):
    bench(terminates=2, word=word)
    env = worlds()
    env.reset()
    env.step(torch.zeros(2, 2), torch.tensor([True, False]))
    info = env.step(torch.zeros(2, 2)).info
    assert ("success" in info) == (word is not None)
    if word is not None:
        assert info["success"].tolist() == [True, False]


def test_actions_are_clipped_and_keep_the_shape_and_type_of_their_space(bench):
    bench(action=spaces.Box(-0.7, np.array([[0.7], [2.0]]), (2, 1), np.float64))
    env = worlds(1)
    assert env.spec.action.low == (-0.7, -0.7) and env.spec.action.high == (0.7, 2.0)
    env.reset()
    step = env.step(torch.tensor([[5.0, -5.0]]))
    taken = inner(env).taken[0]
    assert taken.tolist() == [[0.7], [-0.7]] and taken.dtype == np.float64
    torch.testing.assert_close(step.info["executed"], torch.tensor([[0.7, -0.7]]))


def test_goals_and_images_arrive_in_the_rows_of_their_worlds(bench):
    top = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    bench(space=spaces.Dict(observation=BOX, achieved_goal=BOX, desired_goal=BOX, top=top))
    env = worlds()
    assert env.spec.obs.check(env.reset(seeds=[1, 2])) == 2
    obs = env.step(torch.ones(2, 2), torch.tensor([False, True])).obs
    assert obs["image.top"].shape == (2, 3, 4, 5) and obs["image.top"].flatten(1).amax(1).tolist() == [0, 1]
    assert obs["state"].shape == (2, 4) and (obs["goal"][1] != obs["goal"][0]).all()


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"action": spaces.Discrete(2)}, "takes actions of kind Discrete, but policies here act in real numbers"),
        ({"action": spaces.MultiDiscrete([2, 3])}, "actions of kind MultiDiscrete"),
        ({"action": spaces.Box(0, 5, (2,), np.int64)}, "actions of kind Box of int64"),
        ({"action": spaces.Dict(a=BOX)}, "actions of kind Dict"),
        ({"action": spaces.Box(-np.inf, 1.0, (2,))}, "actions without limits"),
        ({"space": spaces.Discrete(3)}, "observes something of kind Discrete, but only Box, Dict and Tuple are read"),
        ({"space": spaces.Dict(a=BOX, b=spaces.Text(9))}, "observes b of kind Text"),
        ({"limit": None}, "has no limit of time; give env.max_steps"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_sentence(bench, kwargs, sentence):
    bench(**kwargs)
    with pytest.raises(BurnishError, match=sentence) as caught:
        worlds()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"id": "Pendulun-v1"}, "env.id=Pendulun-v1 cannot be made .*Pendulum"),
        ({"id": "Pendulum-v77"}, "cannot be made .*version `v77`"),
        ({"id": "NoSuchPackage/Pong-v5"}, "cannot be made .*install what is missing"),
        ({"id": "Pendulum-v1", "kwargs": {"gravity": 3}}, "cannot be made with env.kwargs={'gravity': 3}"),
        ({"kwargs": {"max_episode_steps": 3}}, "env.kwargs cannot set max_episode_steps.* give env.max_steps"),
        ({"kwargs": {"space": BOX}}, "plain data"),
        ({"kwargs": {"nested": [{"call": print}]}}, "plain data"),
        ({"kwargs": [1]}, "plain data"),
        ({"max_steps": 0}, "env.max_steps=0 must be at least 1"),
        ({"control_hz": 0.0}, "must be a positive number"),
        ({"id": "GymV26Environment-v0", "kwargs": {"env_id": "os:A-v0"}}, "import a module by"),
        ({"id": "Pendulum-v1", "package": "no_such_package"}, "No module named 'no_such_package'"),
        ({"id": "no_such_module:Class"}, "No module named 'no_such_module'"),
        ({"success": "won", "success_reward": 1.0}, "both say what a success is"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_in_one_sentence(config, sentence):
    with pytest.raises(BurnishError, match=sentence) as caught:
        worlds(**config)
    assert "\n" not in str(caught.value)


def test_rate_and_mode(bench):
    assert ExternalEnv(1).spec.control_hz == 20.0, "1 / dt of the pendulum, whose films run at another rate"
    assert worlds().spec.control_hz == 12.0
    assert worlds(control_hz=3.0).spec.control_hz == 3.0
    assert ExternalEnv(1).spec.action_mode == "gym:Pendulum-v1"
    assert worlds(action_mode="torque").spec.action_mode == "torque"
    assert "12 Hz (its render_fps)" in worlds().describe()
    assert "10 Hz (its control_hz)" in worlds(id="odd_worlds:Late", max_steps=3).describe(), "its dt is a simulator's"
    silent = worlds(id="test_external_worlds:Silent", max_steps=3)
    assert silent.spec.control_hz == 20.0 and "assumed" in silent.describe()


def test_a_world_is_remembered_with_its_arguments():
    config = GymConfig(BENCH, {"terminates": 3, "word": None, "space": [1, 2.0, {"a": True}]}, max_steps=4)
    assert from_data(GymConfig, to_data(config)) == config


def test_saved_in_mid_episode_and_restored_a_world_goes_on_bit_for_bit():
    """Of four worlds one is in mid-episode, two were reset after longer ones, and the last has never begun."""

    def go_on(env, source):
        rows = []
        for tick in range(6):
            step = env.step(torch.rand(4, 2, generator=source), torch.tensor([True, tick % 2 == 0, True, False]))
            rows.append(torch.cat([step.obs["state"], step.reward[:, None]], 1))
        return torch.stack(rows)

    env, source = worlds(4), torch.Generator().manual_seed(0)
    env.reset(torch.tensor([True, True, True, False]), [3, 4, 5, 0])
    for tick in range(5):
        env.step(torch.rand(4, 2, generator=source), torch.tensor([tick < 3, True, True, False]))
    env.reset(torch.tensor([False, True, True, False]))
    saved, dice = env.state_dict(), source.get_state()
    expected = go_on(env, source)
    later, following = env.state_dict(), env.reset()["state"]
    other = worlds(4)
    other.reset(torch.tensor([True, True, True, False]))
    for _ in range(5):
        other.step(torch.ones(4, 2), torch.tensor([True, True, True, False]))
    other.load_state_dict(saved)
    assert torch.equal(go_on(other, source.set_state(dice)), expected)
    assert all(torch.equal(x, later[key]) for key, x in other.state_dict().items()), "nothing of before is left"
    assert torch.equal(other.reset()["state"], following), "the order of seeds was restored too"
    with pytest.raises(BurnishError, match="saved state of a world"):
        worlds(2).load_state_dict(saved)


@pytest.mark.parametrize("said", [True, False], ids=["registered as such", "seen when it is restored"])
def test_a_world_that_its_seed_does_not_determine_begins_anew_and_says_so(bench, caplog, said):
    bench(nondeterministic=said, honest=False)
    env = worlds()
    env.reset()
    env.step(torch.ones(2, 2))
    saved = env.state_dict()
    assert ("played" in saved) is not said
    following = env._clock.state_dict()
    other = worlds(seed=5)
    other.load_state_dict(saved)
    assert "cannot be continued, and begin anew" in caplog.text and not other.continues
    assert all(torch.equal(x, following[key]) for key, x in other._clock.state_dict().items()), "the order of seeds"
    with pytest.raises(BurnishError, match="reset it first"):
        other.step(torch.ones(2, 2))
    other.reset()
    other.step(torch.ones(2, 2))
    assert "played" not in other.state_dict()
    bench(nondeterministic=False)
    caplog.clear()
    honest = worlds()
    honest.reset()
    honest.load_state_dict(honest.state_dict())
    assert honest.continues and not caplog.text, "the control"


def test_pictures_on_request():
    env = worlds(2, kwargs={"render_mode": "rgb_array"})
    env.reset()
    env.step(torch.zeros(2, 2), torch.tensor([False, True]))
    picture = env.render()
    assert picture.dtype == torch.uint8 and picture.shape == (2, 6, 8, 3)
    assert picture.flatten(1).amax(1).tolist() == [0, 1]
    with pytest.raises(BurnishError, match=r"env\.kwargs=\{render_mode: rgb_array\}"):
        worlds().render()


def bytes_of(checkpoint):
    files = sorted(p for p in checkpoint.rglob("*") if p.suffix == ".safetensors" or p.name == "state.json")
    assert files
    return {p.relative_to(checkpoint).as_posix(): p.read_bytes() for p in files}


SMALL = [
    *("worlds=2", "total=36", "log_every=12", "save_every=12", "eval.episodes=2", "eval.worlds=2", "eval.confirm=2"),
    *("method.loop.warmup=8", "method.loop.batch=8", "method.sac.critic.hidden=[8]", "method.sac.critic.members=2"),
    *("method.sac.agent.hidden=[8]", "env.max_steps=10"),
]


@pytest.mark.slow
@pytest.mark.parametrize("said", [True, False], ids=["registered as such", "seen when it is restored"])
def test_a_run_in_a_world_that_cannot_be_restored_is_resumed_with_new_episodes(bench, caplog, tmp_path, said):
    bench(nondeterministic=said, honest=False)
    command = ["finetune", "method=rlpd", "env=gym", f"env.id={BENCH}", "env.processes=0", *SMALL, f"out={tmp_path}"]
    assert main(command) == 0 and "begin anew" not in caplog.text
    last = max((tmp_path / "checkpoints").iterdir())
    shutil.rmtree(last)
    assert main([*command, "resume=true"]) == 0
    assert caplog.text.count("cannot be continued, and begin anew") == 1
    assert last.is_dir()


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys):
    """A policy from nothing is refined in Gymnasium's pendulum, killed and resumed to the same end, and put to work."""
    world = ["env=gym", "env.id=Pendulum-v1", "env.kwargs={g: 9.81}"]
    command = ["finetune", "method=rlpd", *world, *SMALL]
    assert main([*command, f"out={tmp_path}/run"]) == 0
    *_, middle, last = sorted((tmp_path / "run/checkpoints").iterdir())
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints" / last.name)
    assert main([*command, f"out={tmp_path}/killed", "resume=true"]) == 0
    assert bytes_of(tmp_path / "killed/checkpoints" / last.name) == bytes_of(last) != bytes_of(middle)
    acts = ["policy=checkpoint", f"policy.path={tmp_path}/run"]
    capsys.readouterr()
    assert main(["collect", *acts, "episodes=2", "worlds=2", f"out={tmp_path}/data"]) == 0
    assert "gym, 2 episodes, 20 frames" in capsys.readouterr().out
    for word, sentence in (("CartPole-v1", "kind Discrete"), ("MountainCarContinuous-v0", "the policy needs 'state'")):
        assert sentence in refused(capsys, "collect", "env=gym", f"env.id={word}", *acts, f"out={tmp_path}/none")
