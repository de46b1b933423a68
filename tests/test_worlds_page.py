"""docs/worlds.md leads from a task that Burnish never saw to a report, by its five commands and no Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from burnish.policies.cli.cli import VERBS, main

TEXT = (Path(__file__).parents[1] / "docs" / "worlds.md").read_text(encoding="utf-8")

# A stranger's module: a point is moved to a place in the plane.
MY_TASK = """
import gymnasium
import numpy as np

class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-4, 4, (4,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.observe(), {}
    def observe(self):
        return np.concatenate([self.point, self.goal - self.point])
    def step(self, action):
        self.point = np.clip(self.point + 0.1 * action, -2, 2)
        far = np.linalg.norm(self.goal - self.point)
        return self.observe(), -float(far), bool(far < 0.1), False, {"is_success": far < 0.1}

class Straight:
    def __init__(self, env):
        self.env = env.unwrapped
    def reset(self, obs, info):
        pass
    def act(self, obs, info):
        return np.clip(10 * (self.env.goal - self.env.point), -1, 1)

expert = Straight
gymnasium.register("my_task/Reach-v0", Reach, max_episode_steps=40)
"""

# As much less as shows that it runs.
LESS = {
    "collect": ["episodes=8", "worlds=4"],
    "pretrain": ["train.steps=30", "train.batch=16", "policy.net.mlp.hidden=[16]", "eval.episodes=4", "eval.worlds=4"],
    "compare": ["methods=small.yaml", "budget=200", "seeds=1", "episodes=4", "videos=0"],
}
# A method whose warm-up is over before such a budget is.
SMALL = """
defaults:
  - override /method: residual_td3
method: {loop: {warmup: 16, initial_updates: 2, batch: 8}}
worlds: 2
eval: {episodes: 4, worlds: 2, confirm: 4}
"""


def commands() -> list[list[str]]:
    block = re.search(r"<!-- five commands -->\n```sh\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    return [line.removeprefix("burnish ").split() for line in block[1].splitlines()]


def test_the_page_has_five_commands_of_verbs_that_exist():
    assert len(commands()) == 5 and all(verb in VERBS for verb, *_ in commands())


@pytest.mark.slow
def test_the_five_commands_lead_to_a_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_task.py").write_text(MY_TASK)
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of child processes
    assert re.search(r"^export BURNISH_IMPORT=my_task$", TEXT, re.MULTILINE)
    monkeypatch.setenv("BURNISH_IMPORT", "my_task")
    try:
        for verb, *words in commands():
            replaced = {word.partition("=")[0] for word in LESS.get(verb, [])}
            kept = [word for word in words if word.partition("=")[0] not in replaced]
            assert main([verb, *kept, *LESS.get(verb, [])]) == 0, capsys.readouterr().err
    finally:
        sys.modules.pop("my_task", None)
    assert "my_task/Reach-v0" in capsys.readouterr().out
    assert (tmp_path / "runs/compared/report.html").stat().st_size > 1000
