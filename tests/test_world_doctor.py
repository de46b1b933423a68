"""`burnish doctor env=...` tells what a world is and which promises it keeps, and sees each one that is broken."""

from __future__ import annotations

import itertools
import os
import re
import signal
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from burnish.finetune.compare.entrants import world_words
from burnish.finetune.doctor.__main__ import GROUPS
from burnish.finetune.doctor.__main__ import DoctorConfig as VerbConfig
from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.core.errors import BurnishError
from burnish.sim.external.doctor import as_yaml, described, read_back, refused, restoring, seeding
from burnish.sim.external.examination import Seen, first_difference, play
from burnish.sim.external.maniskill import ManiSkillConfig
from burnish.sim.external.settings import GymConfig, RemoteConfig, Reward
from burnish.sim.external.worlds import ExternalEnv
from burnish.sim.tasks.insert import InsertConfig
from burnish.sim.two_mode import TwoModeConfig

counter = itertools.count()


# What an info says of a success: the first four are one truth value.
SAYS = {"bool": bool, "none": lambda won: None, "array": lambda won: np.array([won]), "one": float, "text": str}
SAYS |= {"two": lambda won: np.array([won, won]), "dict": lambda won: {"won": won}}
SAYS |= {"share": lambda won: 0.3, "nan": lambda won: np.nan}


class Drifter(gymnasium.Env):
    """Observes in its first element the number of the tick, and in its second one whatever ``habit`` says."""

    metadata: Any = None
    observation_space = spaces.Dict(place=spaces.Box(-9, 9, (2,)), top=spaces.Box(0, 255, (4, 5, 3), np.uint8))
    action_space = spaces.Box(-1, np.array([1, 3], np.float32))

    def __init__(self, habit: str = "honest", word: str | None = None, says: str = "bool"):
        self.habit, self.word, self.says = habit, word, SAYS[says]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tick = 0
        return self.see(), {}

    def see(self):
        number = {
            "honest": lambda: self.np_random.normal(),
            "same": lambda: 0.0,
            "free": lambda: next(counter),
            "late": lambda: next(counter) if self.tick > 2 else self.np_random.normal(),
            "broken": lambda: np.nan,
            "unpaid": lambda: 0.0,
        }[self.habit]()
        return {"place": np.array([self.tick, number], np.float32), "top": np.zeros((4, 5, 3), np.uint8)}

    def step(self, action):
        self.tick += 1
        info = {} if self.word is None else {self.word: self.says(self.tick == 8)}
        return self.see(), np.nan if self.habit == "unpaid" else 0.0, False, self.tick == 8, info


class Killer(Drifter):
    def step(self, action):
        os.kill(os.getpid(), signal.SIGKILL)


def seen(**kwargs: Any) -> tuple[Seen, Seen]:
    """As the two processes see it, one after the other in this one: `counter` is what differs between them."""
    config = GymConfig("test_world_doctor:Drifter", kwargs, max_steps=10)
    first = play(config, {1: None, 2: None}, 5.0, restores=True)
    return first, play(config, {2: 8, 1: 8}, 5.0, restores=False)


def test_a_world_that_keeps_its_promises():
    first, second = seen(word="success")
    assert "the same in 8 and 8 steps, bit for bit. Other seeds give other" in seeding(first, second).text
    assert restoring(first).text.endswith("it went on bit for bit.") and not restoring(first).advice
    told = [line.text for line in described(GymConfig(), first)]
    assert "state (2 numbers, of place) and image.top (3 x 4 x 5, of top)" in told[0]
    assert "2 dimensions, between -1 and 1, -1 and 3" in told[1]
    assert "20 times a second, as is assumed" in told[2] and "10 steps, 0.5 seconds" in told[3]
    assert told[0].startswith("test_world_doctor:Drifter can be used")
    assert "It draws no pictures" in told[4]
    assert "success or is_success in its info. It was reported in the 16 steps" in told[5]
    assert "random actions succeeded" in told[5]


@pytest.mark.parametrize(
    ("habit", "equal", "other"),
    [
        ("free", "do not give equal episodes: .* from their first observation on", "led elsewhere"),
        ("late", "do not give equal episodes: .* from step 3 on", "led elsewhere"),
        ("same", "But other seeds give the same episode again", ""),
    ],
)
def test_each_broken_promise_is_seen_and_comes_with_advice(habit, equal, other):
    first, second = seen(habit=habit)
    line = seeding(first, second)
    assert re.search(equal, line.text) and line.advice
    assert other in first.restored and bool(other) == bool(restoring(first).advice)


@pytest.mark.parametrize("says", SAYS)
def test_a_success_that_is_not_one_truth_value_is_refused(says):
    env = ExternalEnv(1, GymConfig("test_world_doctor:Drifter", {"word": "success", "says": says}, max_steps=10))
    env.reset()
    if says in ("text", "two", "dict", "share", "nan"):
        with pytest.raises(BurnishError, match=r"its info says success=.*, which is not one truth value"):
            env.step(torch.zeros(1, 2))
    else:
        won = [bool(env.step(torch.zeros(1, 2)).info["success"]) for _ in range(8)]
        assert won == [False] * 7 + [says != "none"]


def test_a_reward_that_is_no_number_is_said():
    first, _ = seen(habit="unpaid")
    lines = list(described(GymConfig(), first))
    assert "gives numbers that are not finite" in lines[0].text and "first was the reward" in lines[1].text


def test_what_is_not_reported_or_no_number_is_said():
    first, _ = seen(habit="broken", word="solved")
    lines = list(described(GymConfig(), first))
    assert "gives numbers that are not finite" in lines[0].text and re.search(r"first was \w+\[\d+\]", lines[1].text)
    assert "none was reported" in lines[-1].text and "env.success=KEY" in lines[-1].advice
    assert not first.drawn and any("render_mode: rgb_array" in line.advice for line in lines)
    assert not any("no films" in line.text for line in described(GymConfig(), replace(first, drawn=True)))
    lines = list(described(ManiSkillConfig(), replace(first, reported=False)))
    assert "env.film=true" in str(lines) and "env.success=" not in str(lines), "what these settings do not have"


def test_a_world_that_ends_before_its_limit_is_told():
    first = play(GymConfig("test_world_doctor:Drifter", max_steps=8), {1: None}, 5.0, restores=False)
    assert first.cut is None
    (line,) = (line for line in described(GymConfig(), seen()[0]) if "at most 10 steps" in line.text)
    assert "cut one off after 8" in line.text and "env.max_steps=8" in line.advice


def test_prints_are_compared_as_far_as_both_go():
    assert first_difference("abc", "ab") is None and first_difference("abc", "axc") == 1


@pytest.mark.parametrize(
    "world",
    [
        GymConfig("Pendulum-v1", {"g": 9.81, "render_mode": "rgb_array"}, control_hz=5),
        GymConfig("Pendulum-v1", success_reward=-0.5, reward=Reward.until_success, end_at_success=True),
        TwoModeConfig(),
        InsertConfig(clearance_m=0.0002),
    ],
    ids=lambda world: type(world).__name__,
)
def test_the_file_makes_the_same_world_wherever_such_files_are_read(world, tmp_path):
    text = as_yaml(world)
    assert yaml.safe_load(text) and read_back(text) == world
    (tmp_path / "world.yaml").write_text(text)
    words = world_words(str(tmp_path / "world.yaml"))
    assert to_object(compose("doctor", VerbConfig, GROUPS["doctor"], words)).env == world


def test_the_server_of_an_address_says_which_world_it_is():
    world = RemoteConfig(address="there:7777")
    assert "id:" not in as_yaml(world) and read_back(as_yaml(world)) == world
    assert "id: Pendulum-v1" in as_yaml(GymConfig())


def test_a_file_of_ones_own_may_say_of_a_world_what_a_command_may(tmp_path):
    world = GymConfig("Ant-v5", {"xml_file": "my.xml"})
    (tmp_path / "world.yaml").write_text(as_yaml(world))
    with pytest.raises(BurnishError, match=r"xml_file='my.xml', an argument that is not known .*trust_world=true"):
        world_words(str(tmp_path / "world.yaml"))
    words = world_words(str(tmp_path / "world.yaml"), trusted=True)
    assert to_object(compose("doctor", VerbConfig, GROUPS["doctor"], words)).env == world


def test_arguments_that_a_strangers_file_may_not_say_are_named():
    world = GymConfig("Ant-v5", {"xml_file": "my.xml"})
    assert read_back(as_yaml(world)) == world
    assert "names it: it says env.kwargs.xml_file='my.xml', an argument that is not known" in refused(as_yaml(world))
    assert not refused(as_yaml(GymConfig("Pendulum-v1", {"g": 9.81})))
    there = RemoteConfig("Some/World-v0", success="solved", address="there:7777")
    assert read_back(as_yaml(there)) == there
    assert "files start and reach nothing" in refused(as_yaml(there))


@pytest.mark.slow
def test_from_the_command_line(capfd):
    assert main(["doctor", "env=gym", "env.id=Pendulum-v1", "env.max_steps=20", "worlds=2", "seconds=0.5"]) == 0
    text = capfd.readouterr().out
    for words in (
        "Pendulum-v1 can be used. It observes state (3 numbers).",
        "as its dt says",
        "2 worlds in 2 processes make",
    ):
        assert words in text
    assert "Other seeds give other episodes" in text and "it went on bit for bit" in text
    assert yaml.safe_load(text[text.index("# @package") :])["env"] == {"id": "Pendulum-v1", "max_steps": 20}


@pytest.mark.slow
def test_our_own_worlds_are_examined_too(capfd):
    assert main(["doctor", "env=two_mode", "worlds=2", "seconds=0.5"]) == 0
    text = capfd.readouterr().out
    assert "two_mode can be used" in text and "it went on bit for bit" in text and "Other seeds give other" in text


def test_a_world_that_kills_its_process_costs_a_sentence(capfd):
    assert main(["doctor", "env=gym", "env.id=test_world_doctor:Killer", "env.max_steps=5"]) == 2
    error = capfd.readouterr().err
    assert "the process in which test_world_doctor:Killer was tried died without a word" in error
