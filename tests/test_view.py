"""`burnish view`: films where there is no screen, MuJoCo's window where there is one."""

from __future__ import annotations

import time

import pytest

from burnish.policies.cli.cli import main
from burnish.sim import view

mujoco = pytest.importorskip("mujoco")
pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    monkeypatch.setattr(view, "_can_open_windows", lambda: False)


def refusal(capsys, *words):
    assert main(["view", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("burnish view: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("world", ["reach", "two_mode"])
def test_an_episode_becomes_a_film_that_says_how_it_ended(world, tmp_path, capsys):
    import av

    assert main(["view", f"env={world}", "episodes=1", "size=96", f"out={tmp_path}/films"]) == 0
    (file,) = (tmp_path / "films").iterdir()
    assert file.name.startswith("seed_") and file.name.endswith("_success.mp4")
    told = capsys.readouterr().out
    assert str(file) in told and "1 episodes" in told and "1 successful" in told
    with av.open(str(file)) as film:
        frames = [frame.to_ndarray(format="rgb24").astype(int) for frame in film.decode(video=0)]
    assert frames[0].shape == (96, 96, 3)
    assert (abs(frames[-1] - frames[0]) > 30).any(), "the world stood still"


def test_without_a_screen_and_a_folder_films_go_to_runs_view(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["view", "env=two_mode", "episodes=2", "size=32"]) == 0
    assert len(list((tmp_path / "runs/view").glob("seed_*.mp4"))) == 2


def test_what_cannot_be_shown_is_refused_in_one_sentence(tmp_path, capsys):
    assert "lqr draws no pictures" in refusal(capsys, "env=lqr", f"out={tmp_path}/a")
    assert "size=3 must" in refusal(capsys, "env=reach", "size=3", f"out={tmp_path}/a")
    assert "did you mean 'clumsy'" in refusal(capsys, "env=reach", "expert=clumsi", f"out={tmp_path}/a")
    words = ["env=reach", "expert=clean", "policy=checkpoint", "policy.path=x", f"out={tmp_path}/a"]
    assert "cannot both act" in refusal(capsys, *words)
    assert not list(tmp_path.iterdir())


class FakeViewer:
    """Stands for the window, which needs a screen."""

    def __init__(self, model, data, closed_after=10**6):
        self.places, self.closed, self._data, self._closed_after = [], False, data, closed_after

    def is_running(self):
        return len(self.places) < self._closed_after

    def sync(self):
        self.places.append(self._data.qpos.copy())

    def close(self):
        self.closed = True


def window(monkeypatch, **options):
    import mujoco.viewer

    opened = []

    def launch(model, data):
        opened.append(FakeViewer(model, data, **options))
        return opened[-1]

    monkeypatch.setattr(view, "_can_open_windows", lambda: True)
    monkeypatch.setattr(mujoco.viewer, "launch_passive", launch)
    return opened


def test_a_window_follows_the_world_in_its_own_time(monkeypatch, capsys):
    opened = window(monkeypatch)
    start = time.monotonic()
    assert main(["view", "env=reach", "episodes=1"]) == 0
    took, (viewer,) = time.monotonic() - start, opened
    assert viewer.closed and "1 successful" in capsys.readouterr().out
    ticks = len(viewer.places) - 1
    assert ticks > 5 and took > 0.9 * ticks / 20  # reach is controlled at 20 Hz
    assert (viewer.places[0] != viewer.places[-1]).any()


def test_closing_the_window_is_the_end(monkeypatch, capsys):
    opened = window(monkeypatch, closed_after=3)
    assert main(["view", "env=reach", "episodes=50"]) == 0
    assert opened[0].closed and len(opened[0].places) == 3


def test_toy_worlds_have_films_only(monkeypatch, tmp_path):
    opened = window(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "env=two_mode", "episodes=1", "size=32"]) == 0
    assert not opened and len(list((tmp_path / "runs/view").iterdir())) == 1
