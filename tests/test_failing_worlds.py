"""Worlds that raise errors, show what is no number, or kill their process: one sentence, or by env.restart=true the end
of one episode, which evaluations and collections play again."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import odd_worlds
import pytest
import torch

from burnish.policies.core.errors import BurnishError, WorldError
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.collect import collect
from burnish.sim.external import world_server
from burnish.sim.external.settings import GymConfig, RemoteConfig
from burnish.sim.external.worlds import ExternalEnv


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a server of worlds that fail in the third step of each episode that begins with an odd seed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, str(world_server.__file__), "--listen", found, "--id", "odd_worlds:Raising"]
    tests = {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=tests)
    assert process.stderr is not None and "serving" in process.stderr.readline()
    yield found
    process.kill()
    process.communicate()


@pytest.mark.parametrize("way", [0, 1, 2, "server"])
def test_what_others_did_in_the_step_in_which_one_world_failed_is_kept(way, address):
    """Five worlds, so that the shares of two processes differ; the last world of a share fails too."""
    given: dict[str, Any] = {"max_steps": 9, "restart": True}
    if way == "server":
        env = ExternalEnv(5, RemoteConfig(address=address, processes=1, **given))
    else:
        env = ExternalEnv(5, GymConfig("odd_worlds:Raising", processes=way, **given))
    env.reset(seeds=[2, 1, 2, 2, 1])
    shown = [env.step(torch.zeros(5, 2)) for _ in range(3)][-1]
    assert shown.truncated.tolist() == shown.info["lost"].tolist() == [False, True, False, False, True]
    assert shown.obs["state"][:, 0].tolist() == [3, 2, 3, 3, 2], "a world that failed shows what it showed before"
    assert shown.reward.tolist() == [3, 2, 3, 3, 2], "and is paid as before"
    env.reset(shown.truncated, seeds=[2] * 5)
    step = env.step(torch.zeros(5, 2))
    assert step.obs["state"][:, 0].tolist() == [4, 1, 4, 4, 1] and not step.info["lost"].any()


def test_a_process_that_is_replaced_in_a_reset_begins_all_of_its_worlds(tmp_path):
    """The reset of its last world fails once too often for this process, and in the next one it succeeds."""
    kwargs = {"unwilling": 3, "file": str(tmp_path / "willing")}
    env = ExternalEnv(5, GymConfig("odd_worlds:Unwilling", kwargs=kwargs, max_steps=9, processes=2, restart=True))
    assert (env.reset(seeds=[2, 2, 2, 2, 3])["state"] == 0).all() and (tmp_path / "willing").exists()
    assert env.step(torch.zeros(5, 2)).truncated.tolist() == [False] * 5


class Still:
    """A controller that does nothing."""

    def reset(self, mask: Any = None, seeds: Any = None) -> None: ...

    def step(self, obs: Any) -> torch.Tensor:
        return torch.zeros(len(obs["state"]), 2)


def flaky() -> ExternalEnv:
    """Every second process-wide try of an episode fails in its third step."""
    return ExternalEnv(2, GymConfig("odd_worlds:Flaky", max_steps=12, processes=0, restart=True))


def test_evaluations_play_lost_episodes_again(caplog):
    found = evaluate(flaky(), Still(), [1, 2, 3, 4])
    assert found.lengths == [12] * 4 and found.returns == [78.0] * 4
    assert "cut off 4 episodes, which were played again" in caplog.text
    assert found.repeatable, "that another try fails is no difference of what equal seeds lead to"
    always = ExternalEnv(
        1, GymConfig("odd_worlds:Raising", kwargs={"fails": 12}, max_steps=20, processes=0, restart=True)
    )
    with pytest.raises(WorldError, match="cut off the episode of seed 1 10 times"):
        evaluate(always, Still(), [1])


def test_collections_record_lost_episodes_again():
    found = collect(flaky(), Still(), [1, 2, 3, 4])
    assert [len(episode) for episode in found] == [12] * 4 and [episode.seed for episode in found] == [1, 2, 3, 4]
    assert all(episode.obs["state"][:, 0].tolist() == [*range(13)] for episode in found)


def test_a_number_that_float32_does_not_hold_is_not_finite():
    env = ExternalEnv(1, GymConfig("odd_worlds:Huge", max_steps=5, control_hz=10, processes=0))
    env.reset()
    with pytest.raises(WorldError, match=r"its observation is 1e\+39; .* cannot be learnt from; correct it$"):
        env.step(torch.zeros(1, 2))


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_of_an_environment_names_its_line_or_truncates_its_episode(processes, caplog):
    config = GymConfig("odd_worlds:Raising", kwargs={"fails": 12}, max_steps=20, processes=processes)
    env = ExternalEnv(2, config)
    env.reset(seeds=[1, 2])
    for _ in range(11):
        env.step(torch.zeros(2, 2))
    line = (
        Path(odd_worlds.__file__)
        .read_text()
        .splitlines()
        .index('            raise FloatingPointError("the solver diverged")')
    )
    with pytest.raises(BurnishError) as error:
        env.step(torch.zeros(2, 2))
    assert f"diverged (at {odd_worlds.__file__}:{line + 1}); " in str(error.value) and "env.restart=true" in str(
        error.value
    )
    env = ExternalEnv(2, replace(config, restart=True))
    env.reset(seeds=[1, 2])
    for _ in range(11):
        assert not env.step(torch.zeros(2, 2)).truncated.any()
    ended = env.step(torch.zeros(2, 2)).truncated.tolist()
    assert ended == [True, False] and "the episode of world 0 of" in caplog.text
    env.reset(torch.tensor([True, False]), seeds=[2, 2])
    step = env.step(torch.zeros(2, 2))
    assert step.obs["state"][:, 0].tolist() == step.reward.tolist() == [1, 13], "the other one was stepped too, once"


def test_an_environment_that_fails_at_once_each_time_ends_the_run():
    env = ExternalEnv(1, GymConfig("odd_worlds:Raising", max_steps=20, processes=0, restart=True))
    env.reset(seeds=[1])
    with pytest.raises(BurnishError, match=r"failed: in 3 episodes in a row within 10 steps: FloatingPointError: the"):
        for _ in range(9):
            if env.step(torch.zeros(1, 2)).truncated.any():
                env.reset(seeds=[3])


def test_an_environment_that_kills_its_process_each_time_ends_the_run():
    env = ExternalEnv(2, GymConfig("odd_worlds:Deadly", max_steps=20, processes=1, restart=True))
    env.reset()
    with pytest.raises(
        BurnishError, match=r"died \(.*\) in 3 episodes in a row within 10 steps; correct the environment"
    ):
        for _ in range(9):
            if env.step(torch.zeros(2, 2)).truncated.all():
                env.reset()


@pytest.mark.parametrize(("unwilling", "begins"), [(2, True), (99, False)])
def test_a_reset_that_fails_is_tried_again(unwilling, begins):
    config = GymConfig("odd_worlds:Unwilling", kwargs={"unwilling": unwilling}, max_steps=9, processes=0, restart=True)
    env = ExternalEnv(2, config)
    if begins:
        assert (env.reset(seeds=[1, 2])["state"] == 0).all()
    else:
        with pytest.raises(BurnishError, match="failed again when it was made anew and reset"):
            env.reset(seeds=[1, 2])


def test_an_episode_that_shows_no_number_ends_where_it_showed_one():
    config = GymConfig("odd_worlds:Raising", kwargs={"fails": 3, "shows": True}, max_steps=9, processes=1, restart=True)
    env = ExternalEnv(2, config)
    env.reset(seeds=[1, 2])
    steps = [env.step(torch.zeros(2, 2)) for _ in range(4)]
    assert [step.truncated.tolist() for step in steps[:3]] == [[False, False], [False, False], [True, False]]
    assert all(bool(step.obs["state"].isfinite().all() and step.reward.isfinite().all()) for step in steps)
    assert steps[2].obs["state"][:, 0].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("habit", "found"), [("broken", r"number \[1\] of its observation place is nan"), ("unpaid", "its reward is nan")]
)
def test_what_is_not_finite_is_an_error_of_its_environment(habit, found):
    with pytest.raises(BurnishError, match=found):
        env = ExternalEnv(2, GymConfig("test_world_doctor:Drifter", {"habit": habit}, max_steps=9, processes=1))
        env.reset()
        env.step(torch.zeros(2, 2))
