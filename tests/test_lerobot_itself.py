"""LeRobot's own reader on sets of ours, in an environment of its own: `make test-lerobot`."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from test_lerobot import make_episodes

from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.external.recipes import ENVIRONMENTS

# torchvision is there for its networks: its compiled operators are built for another torch, and pictures need none.
READ = """
import sys, types
import numpy as np
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
from lerobot.datasets.lerobot_dataset import LeRobotDataset
found = LeRobotDataset("owner/ours", root=sys.argv[1])
rows = [found[i] for i in range(len(found))]
names = [name for name in rows[0] if name != "task"]
columns = {name.replace(".", "/"): np.stack([np.asarray(row[name]) for row in rows]) for name in names}
np.savez(sys.argv[2], episodes=found.num_episodes, fps=found.fps, task=[row["task"] for row in rows], **columns)
"""


@pytest.mark.slow
@pytest.mark.skipif(ENVIRONMENTS.made("lerobot") is None, reason="`burnish policies add lerobot` was not called here")
def test_lerobot_itself_reads_each_row_of_ours(tmp_path):
    written = make_episodes()
    write_lerobot(written, tmp_path / "set")
    words = [ENVIRONMENTS.python("lerobot"), "-c", READ, tmp_path / "set", tmp_path / "read.npz"]
    subprocess.run(words, check=True, cwd=tmp_path)
    read = np.load(tmp_path / "read.npz")
    assert read["episodes"] == len(written) and read["fps"] == int(written.spec.control_hz)  # theirs are whole
    of, first = read["episode_index"], 0
    for k, episode in enumerate(written):
        rows = slice(first, first := first + len(episode.action))
        assert (of[rows] == k).all() and read["frame_index"][rows].tolist() == list(range(len(episode.action)))
        assert set(read["task"][rows]) == {episode.task}
        assert np.array_equal(read["action"][rows], episode.action)
        assert np.array_equal(read["observation/state"][rows], episode.obs["state"][:-1])
        pictures = episode.obs["image.front"][:-1].numpy()
        assert np.abs(255 * read["observation/images/front"][rows] - pictures).max() < 0.5
    assert first == len(of)
