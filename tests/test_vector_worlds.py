"""An environment of `gymnasium.vector` as worlds: whenever it begins rows by itself, they play the episodes that one
environment plays alone."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from burnish.policies.core.errors import BurnishError
from burnish.sim.external.settings import GymConfig
from burnish.sim.external.worlds import ExternalEnv

MODES = [mode.name for mode in AutoresetMode]
NUM, TICKS, LIMIT = 3, 60, 9


class Walk(gymnasium.Env):
    """A walk with steps of its own; it succeeds and ends beyond 2, and shows pictures of where it is."""

    observation_space = gymnasium.spaces.Dict(
        {"place": gymnasium.spaces.Box(-99, 99, (2,)), "picture": gymnasium.spaces.Box(0, 255, (4, 5, 3), np.uint8)}
    )
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen(), {}

    def step(self, action):
        self.place = self.place + np.float32([action[0], self.np_random.normal()])
        won = bool(self.place[0] > 2)
        return self.seen(), float(self.place[1]), won, False, {"success": won}

    def seen(self) -> dict[str, np.ndarray]:
        return {"place": self.place.copy(), "picture": np.full((4, 5, 3), int(abs(self.place[1]) * 10) % 256, np.uint8)}


def bare() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Walk(), LIMIT)


class Earlier(SyncVectorEnv):
    """Begins rows in the same step, and says where they had led by other names: as Gymnasium 0.29 does, row by row; as
    ManiSkill does, in one observation of all rows; or not at all."""

    def __init__(self, num_envs: int, names: str) -> None:
        super().__init__([bare] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self.names = names

    def step(self, actions: Any) -> Any:
        obs, *facts, info = super().step(actions)
        seen, said = info.pop("final_obs", None), info.pop("final_info", None)
        if said is not None and self.names != "none":
            led = [{key: x[i] for key, x in obs.items()} if x is None else x for i, x in enumerate(seen)]
            whole = {key: np.stack([x[key] for x in led]) for key in obs}
            each = [
                {"success": bool(x)} if there else None
                for x, there in zip(said["success"], said["_success"], strict=True)
            ]
            info["final_observation"] = seen if self.names == "0.29" else whole
            info["final_info"] = np.array(each, object) if self.names == "0.29" else said
        return obs, *facts, info


def rows(num_envs: int, mode: str) -> SyncVectorEnv:
    if mode not in MODES:
        return Earlier(num_envs, mode)
    return SyncVectorEnv([bare] * num_envs, autoreset_mode=AutoresetMode[mode])


class Bright(SyncVectorEnv):
    """Declares bytes, and shows pictures between 0 and 1."""

    def reset(self, **given: Any) -> Any:
        obs, info = super().reset(**given)
        return {**obs, "picture": obs["picture"] / 255}, info


def bright(num_envs: int) -> Bright:
    return Bright([bare] * num_envs)


class Deaf(SyncVectorEnv):
    """Begins all of its rows whenever one is to begin, as environments do that know no mask."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


def deaf(num_envs: int) -> Deaf:
    return Deaf([bare] * num_envs)


def config(made: str, **settings: Any) -> GymConfig:
    given = {"max_steps": LIMIT, "processes": 0, "vector": True, **settings}
    return GymConfig(f"test_vector_worlds:{made}", **given)


def action_of(seed: int, tick: int) -> np.ndarray:
    return np.random.default_rng([seed, tick]).uniform(-0.2, 1, 1).astype(np.float32)


def episode(seed: int) -> list[tuple[Any, ...]]:
    """Of the bare environment, alone: place, picture, reward, terminated, truncated, success."""
    env = bare()
    obs, _ = env.reset(seed=seed)
    found = [(obs["place"], obs["picture"], 0.0, False, False, False)]
    while not any(found[-1][3:5]):
        obs, reward, terminated, truncated, info = env.step(action_of(seed, len(found) - 1))
        found.append((obs["place"], obs["picture"], reward, terminated, truncated and not terminated, info["success"]))
    return found


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [*MODES, "0.29", "ManiSkill"])
def test_each_row_plays_the_episodes_of_the_bare_environment(mode, processes):
    env = ExternalEnv(NUM, config("rows", kwargs={"mode": mode}, processes=processes))
    seeds, ticks, begun, ends = list(range(NUM)), [0] * NUM, NUM, {"terminated": 0, "truncated": 0}

    def compare(obs: dict[str, torch.Tensor]) -> None:
        for i in range(NUM):
            place, picture, *_ = episode(seeds[i])[ticks[i]]
            assert np.array_equal(obs["state"][i].numpy(), place), (i, ticks[i])
            assert np.array_equal(obs["image.picture"][i].numpy(), np.moveaxis(picture, 2, 0))

    compare(env.reset(seeds=seeds))
    for _ in range(TICKS):
        step = env.step(torch.from_numpy(np.stack([action_of(seeds[i], ticks[i]) for i in range(NUM)])))
        ticks = [tick + 1 for tick in ticks]
        compare(step.obs)  # where the action led: at an end too
        now = [episode(seeds[i])[ticks[i]] for i in range(NUM)]
        assert step.reward.tolist() == [np.float32(x[2]) for x in now]
        for k, found in ((3, step.terminated), (4, step.truncated), (5, step.info["success"])):
            assert found.tolist() == [bool(x[k]) for x in now]
        ended = step.terminated | step.truncated
        for name in ends:
            ends[name] += int(getattr(step, name).sum())
        for i in ended.nonzero()[:, 0].tolist():
            seeds, ticks[i], begun = [*seeds[:i], begun, *seeds[i + 1 :]], 0, begun + 1
        if ended.any():
            compare(env.reset(ended, seeds))
    assert min(ends.values()) > 2, "both kinds of end were met"
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_stand_by_keep_what_they_saw_and_are_begun_before_they_go_on(mode):
    env = ExternalEnv(NUM, config("rows", kwargs={"mode": mode}))
    first = env.reset(seeds=[0, 1, 2])
    some = torch.tensor([True, False, True])
    step = env.step(torch.zeros(NUM, 1), some)
    for tick in range(2 * LIMIT):  # the row that stands by comes to its end unseen
        if bool((step.terminated | step.truncated).any()):
            env.reset(some, [10 + tick, 0, 11 + tick])
        step = env.step(torch.zeros(NUM, 1), some)
        assert torch.equal(step.obs["state"][1], first["state"][1]) and step.reward[1] == 0
        assert not step.terminated[1] and not step.truncated[1] and not step.info["success"][1]
    with pytest.raises(BurnishError, match="world 1 stood by while others moved; reset it before it acts"):
        env.step(torch.zeros(NUM, 1), torch.tensor([False, True, False]))
    begun = env.reset(~some, [0, 1, 2])
    assert torch.equal(begun["state"][1], first["state"][1])
    assert not env.continues, "its episodes are not saved"


def test_one_that_hides_where_a_row_ended_is_refused():
    env = ExternalEnv(NUM, config("rows", kwargs={"mode": "none"}))
    env.reset(seeds=[0, 1, 2])
    with pytest.raises(BurnishError, match="it shows no last observation of rows that ended"):
        for _ in range(LIMIT):
            env.step(torch.zeros(NUM, 1))


def test_numbers_that_the_declared_type_does_not_hold_are_refused():
    with pytest.raises(BurnishError, match=r"declares \['picture'\] as uint8 of shape .*, not float64"):
        ExternalEnv(NUM, config("bright")).reset()


def test_one_that_begins_all_rows_for_one_is_refused():
    env = ExternalEnv(NUM, config("deaf"))
    env.reset(seeds=[0, 1, 2])
    env.step(torch.zeros(NUM, 1))
    with pytest.raises(BurnishError, match="its reset must heed options\\['reset_mask'\\]"):
        env.reset(torch.tensor([True, False, False]), [5, 6, 7])


def test_a_registered_one_and_its_pictures():
    settings = GymConfig("Pendulum-v1", {"render_mode": "rgb_array"}, max_steps=30, processes=0, vector=True)
    env = ExternalEnv(2, settings)
    alone = ExternalEnv(2, GymConfig("Pendulum-v1", max_steps=30, processes=0))
    assert torch.equal(env.reset(seeds=[4, 5])["state"], alone.reset(seeds=[4, 5])["state"])
    for _ in range(30):
        one, other = (x.step(torch.ones(2, 1)) for x in (env, alone))
        assert torch.equal(one.obs["state"], other.obs["state"]) and torch.equal(one.reward, other.reward)
    assert one.truncated.all()


def test_no_expert_lives_beside_it():
    with pytest.raises(BurnishError, match="no place for an expert"):
        ExternalEnv(1, config("deaf")).workers.take_on("test_vector_worlds:bare")


def test_one_that_begins_all_rows_when_one_that_stands_by_ends_is_refused():
    env = ExternalEnv(2, config("deaf"))
    env.reset(seeds=[0, 1])
    with pytest.raises(BurnishError, match="must heed"):
        for _ in range(LIMIT):
            step = env.step(torch.zeros(2, 1), torch.tensor([True, False]))
            if (step.terminated | step.truncated)[0]:
                env.reset(torch.tensor([True, False]), [2, 2])
