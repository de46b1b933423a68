"""The parts of a report's page: geometry of its drawings, films within their room, worries about a log, and words."""

from __future__ import annotations

import base64
import math
import shutil

import pytest

import report_lab
from burnish.finetune.compare.report import health, words
from burnish.finetune.compare.report.charts import axis, finite, spread, ticks, together
from burnish.finetune.compare.report.films import films
from report_lab import page


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return report_lab.comparison(tmp_path_factory.mktemp("lab") / "comparison", seeds=1)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "comparison")


# ---- geometry ----


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 100_000), (-3.2, 8.9), (0, 7e-5), (1900, 3400)])
@pytest.mark.parametrize("at_most", [3, 4, 5])
def test_ticks_are_round_inside_and_few(low, high, at_most):
    found = ticks(low, high, at_most)
    assert 2 <= len(found) <= at_most + 1
    assert all(low - 1e-12 <= x <= high * (1 + 1e-12) for x in found)
    digits = {f"{abs(x):e}".split("e")[0].rstrip("0.").replace(".", "") for x in found}
    assert all(len(d) <= 3 for d in digits)


def test_an_axis_survives_a_single_number():
    for value in (0.0, 5.0, -2.0, 1e9):
        assert axis([value], str).place(value) == 50.0
    assert axis([], str).place(0.5) == 50.0


def test_several_runs_become_their_mean_between_their_points():
    a = finite([[0, 0, 0.0, -0.1, 0.1], [10, 1, 1.0, 0.9, 1.1]], 0)
    b = finite([[0, 0, 0.5, 0.4, 0.6], [5, 1, 0.5, 0.3, 0.7], [20, 2, 1.0, 0.9, 1.0]], 0)
    curve = together("x", 0, [a, b])
    assert [p.x for p in curve.points] == [0, 5, 10], "only where both are known"
    middle = curve.points[1]
    assert middle.y == pytest.approx(0.5) and middle.low == pytest.approx(0.3) and middle.high == pytest.approx(0.7)
    assert together("x", 0, [a]).points == a
    assert finite([[0, 0, None, 0, 0], [1, 0, math.nan, 0, 0]], 0) == []


def test_labels_do_not_overlap():
    placed = spread([10, 10.5, 11, 99, 99.5, 100], gap=5)
    assert all(b - a >= 5 - 1e-9 for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False))
    assert max(placed) <= 100
    assert spread([10, 50, 90], gap=5) == [10, 50, 90], "what does not overlap stays"


# ---- films ----


def test_a_narrow_room_keeps_the_base_and_the_best(folder):
    labels = ["base", "dsrl", "reinflow", "dppo"]
    roomy = films(folder / "videos", labels, 10**9)
    assert not roomy.sentence and [[f.label for f in s.films] for s in roomy.strips] == [labels, labels]
    assert roomy.strips[0].films[0].outcome == "failure"
    size = len(roomy.strips[0].films[0].uri)
    tight = films(folder / "videos", labels, int(4.2 * size))
    assert [[f.label for f in s.films] for s in tight.strips] == [["base", "dsrl"]] * 2
    assert "4 films of 8 would make this page too large" in tight.sentence
    nothing = films(folder / "videos", labels, 10)
    assert not nothing.strips and "8 films of 8" in nothing.sentence


def test_films_are_embedded_as_they_are(folder):
    file = sorted((folder / "videos/dsrl").iterdir())[0]
    assert base64.b64encode(file.read_bytes()).decode() in page(folder)
    assert "data:video" not in page(folder, "compare", "videos_mib=0")


def test_a_link_is_not_followed_out_of_the_folder(folder, tmp_path):
    secret = report_lab.film(tmp_path / "secret.mp4")
    for label in ("base", "dsrl"):
        shutil.rmtree(folder / "videos" / label)
        (folder / "videos" / label).mkdir()
        (folder / f"videos/{label}/seed_1_success.mp4").symlink_to(secret)
    assert base64.b64encode(secret.read_bytes()).decode() not in page(folder)
    for label in ("base", "dsrl"):
        (folder / f"videos/{label}/seed_1_success.mp4").unlink()
        shutil.copy(secret, folder / f"videos/{label}/seed_1_success.mp4")
    assert base64.b64encode(secret.read_bytes()).decode() in page(folder), "a copy is shown"


# ---- worries ----

SICK = {
    "kl": 0.5,
    "kl_stopped": 1.0,
    "explained_variance": -0.3,
    "saturation": 0.9,
    "base_distance": 0.9,
    "advice/entropy_trap": 1.0,
    "asynchronous/deaths": 1.0,
    "policy_loss": math.nan,
}


@pytest.mark.parametrize("name", SICK)
def test_each_worry_has_its_opposite(name):
    rows = [{"step": k, name: SICK[name]} for k in range(9)]
    assert [finding.name for finding in health.checkup(rows) if finding.worry] == [name]
    well = [{**row, name: 0.0} for row in rows]
    assert not [finding for finding in health.checkup(well) if finding.worry]


def test_a_stormy_beginning_is_forgiven():
    rows = [{"step": k, "kl": 5.0 if k < 5 else 0.01} for k in range(9)]
    assert not any(finding.worry for finding in health.checkup(rows))


@pytest.mark.parametrize(
    ("low", "count", "worried"), [(0.06, 50, True), (0.29, 50, False), (0.9, 50, False), (0.06, 2, False)]
)
def test_success_that_falls_is_a_worry(low, count, worried):
    """Two refinements of push that collapsed went from about .3 to .1 and less, over some 50 episodes a line. Few
    episodes prove nothing."""
    rows = [{"step": k, "episode/success": 0.3 if k < 4 else low, "episode/count": count} for k in range(12)]
    assert any(finding.worry for finding in health.checkup(rows)) == worried


def test_a_critic_is_measured_by_the_returns():
    def worried(over):
        rows = [{"step": k, "q/return": -10.0, "q/overestimate": over} for k in range(9)]
        return [finding.name for finding in health.checkup(rows) if finding.worry]

    assert worried(6.0) == ["q/overestimate"] and worried(4.0) == []


def test_words():
    assert words.percent(0.428) == "42.8%" and words.percent(None) == words.NOTHING
    assert words.number(-1234.5) == f"{words.MINUS}1,234" and words.number(0.01234) == "0.0123"
    assert [words.counted(x) for x in (0, 2500, 1_500_000)] == ["0", "2.5k", "1.5M"]
    assert [words.duration(x) for x in (4.2, 42, 228, 7200)] == ["4.2 s", "42 s", "3.8 min", "2.0 h"]
    success, returns = words.Measure(True), words.Measure(False)
    assert success.change(0.572) == "+57.2" and success.change(-0.0001) == "0.0" and returns.change(1341) == "+1,341"
    assert success.interval(-0.1, 0.2) == f"[{words.MINUS}10.0, 20.0]" and success.interval(None, 0.2) == ""
