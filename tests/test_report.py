"""``burnish report``: what the page says is what the folder holds, what is missing is a sentence, what is wrong too."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import shlex
import shutil

import pytest
import yaml
from verb_lab import refused

import report_lab
from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.compare.report import words
from burnish.finetune.compare.report.read import read_comparison, read_run
from burnish.finetune.compare.report.settings import from_defaults
from burnish.finetune.compare.report.starts import field_of
from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.core.config import to_data
from burnish.policies.measure.evaluate import Evaluation
from report_lab import page


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison with everything in it; tests that change it take a copy."""
    return report_lab.comparison(tmp_path_factory.mktemp("lab") / "comparison")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "comparison")


def change(folder, **values):
    data = json.loads((folder / "compare.json").read_text())
    report_lab.write(folder / "compare.json", {**data, **values})


def first_run(folder, **values):
    """A change of the first run of a comparison."""
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    change(folder, runs=[{**runs[0], **values}, *runs[1:]])


# ---- what it says ----


def test_the_verdict_is_that_of_the_paired_seeds(folder):
    text = page(folder)
    base, best = (Evaluation.load(folder / f"evaluations/{name}.json").summary() for name in ("base", "dsrl-0"))
    said = f"dsrl succeeds in {words.percent(best['success_rate'])} of the episodes"
    assert said in text and f"on the same seeds in {words.percent(base['success_rate'])}" in text
    assert "insert: 5 methods from one base" in text and "1 run of 15 failed" in text
    assert "the loss is not finite at step 3" in text


def test_a_page_of_a_world_that_ignores_its_seeds_shows_no_pairs(folder):
    why = "equal seeds begin different episodes in this world"
    assert "Paired difference" in page(folder) and "ot paired" not in page(folder)  # control
    first_run(folder, unpaired=why)
    change(folder, unpaired=why)
    text = page(folder)
    assert "Unpaired difference" in text and "Fisher" in text and "McNemar" not in text
    assert "per result, not paired" in text and "on the same seeds" not in text
    assert f"Not paired: {why}, so no run can be shown at the starts of its base." in text


@pytest.mark.parametrize(
    ("low", "high", "begins"),
    [(0.1, 0.2, "dsrl succeeds in"), (-0.1, 0.2, "No method is measurably better"), (-0.2, -0.1, "No method improved")],
)
def test_an_interval_that_holds_zero_is_no_improvement(folder, low, high, begins):
    first_run(folder, difference_low=low, difference_high=high)
    assert f'<p class="verdict">{begins}' in page(folder)


def test_what_was_mended_and_broken_is_counted(folder):
    comparison = read_comparison(folder)
    base, best = (comparison.evaluations[name].success for name in ("base", "dsrl-0"))
    mended = sum(b and not a for a, b in zip(base, best, strict=True))
    field = field_of(comparison, ["dsrl-0"])
    assert not isinstance(field, str)
    tally = field.tallies["dsrl-0"]
    assert f"{base.count(False)} starts on which the base fails, dsrl-0 succeeds on {mended};" in tally
    assert tally in page(folder)


def test_the_scatter_shows_the_coordinates_that_tell(folder):
    """In the lab failures depend on the hole's x, a little on the peg's y, and on nothing else."""
    field = field_of(read_comparison(folder), ["dsrl-0"])
    assert not isinstance(field, str)
    assert field.coordinates[field.x].name == "hole.x"
    assert field.coordinates[field.y].name != "clearance", "a constant shows nothing"


def test_worries_are_found_where_they_are(folder):
    """The lab's dppo clips 82 percent; the others 15, of a limit of 75."""
    text = page(folder)
    found = re.findall(r"<li><strong>([\w-]+)</strong> <code>([\w/]+)</code>", text)
    assert found == [(f"dppo-{seed}", "clip/fraction") for seed in range(3)]


# ---- settings ----


def test_settings_that_differ_are_those_that_were_set(tmp_path):
    run = read_run(report_lab.run_folder(tmp_path / "a", "dsrl", 0, []))
    assert from_defaults(run) == "every setting is as it is by default."
    data = yaml.safe_load((tmp_path / "a/config.yaml").read_text())
    data["method"]["bound"], data["method"]["loop"]["batch"] = 9.5, 17
    (tmp_path / "a/config.yaml").write_text(yaml.safe_dump(data))
    changes = from_defaults(read_run(tmp_path / "a"))
    assert not isinstance(changes, str)
    changed = {change.name: change.value for change in changes}
    assert changed == {"method.bound": "9.5", "method.loop.batch": "17"}


def test_seeds_that_were_not_set_up_alike_are_named(folder):
    sentence = "The runs of dsrl were not set up alike"
    assert sentence not in page(folder)
    file = folder / "runs/dsrl-1/config.yaml"
    data = yaml.safe_load(file.read_text())
    data["method"]["bound"] = 0.125
    file.write_text(yaml.safe_dump(data))
    assert sentence in page(folder)


@pytest.mark.slow
def test_a_real_run_is_repeated_by_the_command_on_its_page(tmp_path, capsys):
    """Every setting, strings and lists included, arrives again."""
    folder = tmp_path / "it's here"
    quoted = "'" + str(folder).replace("'", "\\'") + "'"
    small = ["eval.episodes=4", "eval.worlds=2", "eval.confirm=2"]
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=6", f"out={tmp_path}/data"]) == 0
    flow = ["pretrain", "policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    assert main([*flow, f"data={tmp_path}/data", f"out={tmp_path}/flow", *small]) == 0
    method = ["method=dsrl", "method.loop.warmup=8", "method.loop.batch=8", "method.sac.critic.hidden=[8,8]"]
    loop = ["worlds=2", "total=24", "log_every=4", "eval_every=12", "env=point_reach", "env.max_steps=9"]
    start = ["finetune", "policy=checkpoint", f"policy.path={tmp_path}/flow", f"out={quoted}", *small]
    assert main([*start, *method, *loop]) == 0
    assert main(["report", f"run={quoted}"]) == 0
    text = (folder / "report.html").read_text()
    run = read_run(folder)
    assert len(re.findall(r'<div class="view"', text)) == 2, "against steps and against minutes"
    assert "method.sac.critic.hidden" in text and "dsrl in point_reach" in text
    assert "A single run films nothing" in text and "A single run keeps no record" in text
    command = re.search(r"<pre><code>(.*?)</code></pre>", text, re.DOTALL)
    assert command
    said = shlex.split(command[1].replace("&#39;", "'").replace("&#34;", '"'))
    assert said[:2] == ["burnish", "finetune"]
    again = to_data(to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], said[2:])))
    assert again == {name: value for name, value in run.config.items() if name != "identity"}
    less = to_data(to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], said[2:-1])))
    assert less != again, "each word counts"
    assert f"{tmp_path}/flow" in text
    data = yaml.safe_load((folder / "config.yaml").read_text())
    del data["asynchronous"]  # as if it had come later
    (folder / "config.yaml").write_text(yaml.safe_dump(data))
    assert main(["report", f"run={quoted}"]) == 0
    assert "<pre><code>burnish finetune" in (folder / "report.html").read_text()
    pretrained = page(tmp_path / "flow", "run")
    assert "The command is not known" in pretrained and "the defaults of this kind of run are not known" in pretrained


# ---- nothing from a folder becomes markup, and nothing leaves the page ----

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`"


def test_names_stay_text(folder):
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    starts = json.loads((folder / "starts.json").read_text())
    nasty = [{**run, "error": NASTY} for run in runs]
    change(folder, runs=nasty, world=NASTY, command=NASTY, machine={NASTY: NASTY}, burnish=NASTY)
    report_lab.write(folder / "starts.json", {**starts, "names": [NASTY, *starts["names"][1:]]})
    text = page(folder)
    assert "<script>alert" not in text and "<img" not in text
    assert text.count("<script") == 2 and text.count("&lt;script&gt;alert(1)") >= 5


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("burnish compare base=a\nssh-rsa AAAA stranger\n", "burnish compare base=a ssh-rsa AAAA stranger"),
        ("burnish compare base=a; rm -rf ~ | $(id)", "burnish compare 'base=a;' rm -rf '~' '|' '$(id)'"),
        ("burnish compare 'base=a\nssh-rsa AAAA stranger'", None),
        ("rm -rf ~", None),
        ("burnish compare 'base=a", None),
        ("burnish compare base=runs/bc methods=dsrl,rfs", "burnish compare base=runs/bc methods=dsrl,rfs"),
    ],
)
def test_the_command_of_a_strangers_comparison_is_one_line_of_words(folder, said, shown):
    """It is there to be copied into a shell."""
    change(folder, command=said)
    found = re.findall(r"<pre><code>(burnish .*?|rm .*?)</code></pre>", page(folder), re.DOTALL)
    assert [html.unescape(each) for each in found] == ([] if shown is None else [shown])


def test_the_page_asks_nobody_for_anything(folder):
    text = page(folder)
    assert not re.search(r"""(?:src|href)=["'](?!data:|\#)""", text)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy and script and "default-src 'none'" in policy[1]
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1], "the one script that may run is the page's own"


# ---- what is missing ----


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("videos", "No films were made"),
        ("starts.json", "The first observations of the episodes were not kept"),
        ("evaluations", "Nothing is known of single episodes"),
        ("runs", "No run left a log"),
    ],
)
def test_what_is_missing_is_one_sentence(folder, missing, sentence):
    assert sentence not in page(folder)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert page(folder).count(sentence) == 1


def test_a_comparison_in_which_everything_failed(tmp_path):
    change_all = {"status": "failed", "final": None, "curve": [], "timing": None, "error": None}
    folder = report_lab.comparison(tmp_path / "c", seeds=1, films=0)
    runs = [{**run, **change_all} for run in json.loads((folder / "compare.json").read_text())["runs"]]
    change(folder, runs=runs, methods=[], best=None)
    text = page(folder)
    for sentence in ("No run of this comparison finished", "there are no learning curves", "no table of methods"):
        assert sentence in text
    assert text.count("without saying why") == 5 and "No run of this comparison tells where its time went" in text
    change(folder, runs=[], methods=[])
    assert "This comparison has no runs" in page(folder)


def test_a_world_without_success_is_told_by_returns(tmp_path):
    folder = report_lab.comparison(tmp_path / "c", seeds=1, success=False, films=0, fail=False)
    text = page(folder)
    assert "hopper: 5 methods" in text and "dsrl returns 3," in text
    assert "This world knows no success, so an episode counts as poor here if" in text
    assert "McNemar" not in text.partition("</header>")[0]


def test_a_run_that_was_never_tried(tmp_path):
    folder = report_lab.run_folder(tmp_path / "run", "dsrl", 0, [])
    text = page(folder, "run")
    for sentence in ("dsrl was never tried", "no learning curve", "logged no time", "logged no number"):
        assert sentence in text
    (folder / "metrics.jsonl").unlink()
    assert "Nothing was logged yet" in page(folder, "run")


def test_a_run_that_is_not_told_apart_from_its_base(tmp_path):
    def verdict(last):
        trials = [(0, 0.4, 0.3, 0.5), (1, last, last - 0.1, last + 0.1)]
        names = ("step", "eval/success_rate", "eval/success_low", "eval/success_high")
        rows = [{**dict(zip(names, row, strict=True)), "time/elapsed_s": row[0]} for row in trials]
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return page(report_lab.run_folder(tmp_path / "run", "dsrl", 0, rows), "run")

    assert "which so few episodes do not tell apart" in verdict(0.45)
    assert "dsrl raised success from 40.0% to 80.0%" in verdict(0.8)
    assert "dsrl lowered success from 40.0% to 10.0%" in verdict(0.1)


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give run=FOLDER, or compare=FOLDER"),
        (["run=a", "compare=b"], "give run=FOLDER, or compare=FOLDER"),
        (["run=nowhere"], "nowhere is no run folder"),
        (["compare=nowhere"], "nowhere is no comparison"),
        (["run=a", "videos_mib=-1"], "videos_mib=-1"),
        (["run=a", "video=1"], "did you mean"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, "report", *words)


def test_a_race_is_no_run(tmp_path, capsys):
    folder = report_lab.run_folder(tmp_path / "a", "dsrl", 0, [])
    (folder / "race.json").write_text("{}")
    said = refused(capsys, "report", f"run={folder}")
    assert f"a race of several methods, which its improve.md describes; give a run in {folder}/runs" in said


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"runs": 5}, "runs must be a list"),
        ({"runs": ["x"]}, "runs[0] must be a mapping"),
        ({"runs": [{"seed": 1}]}, "runs[0] has no method"),
        ({"runs": [{"method": "a", "seed": "1"}]}, "runs[0].seed must be int"),
        ({"runs": [{"method": "a", "seed": 1}] * 2}, "names a run twice"),
        ({"runs": [{"method": "a", "seed": 1, "curve": [[1, 2]]}], "best": None}, "rows of 5 numbers"),
        ({"runs": [{"method": "a", "seed": 1, "final": "high"}]}, "runs[0].final must be float"),
        ({"runs": [{"method": "a", "seed": 1, "folder": "../.."}], "best": None}, "leads out of"),
        ({"runs": [{"method": "../../a", "seed": 1}], "best": None}, "leads out of"),
        ({"runs": [{"method": "a\0", "seed": 1}], "best": None}, "leads out of"),
        ({"best": {"method": "nobody", "seed": 0}}, "is not among its runs"),
        ({"methods": [{"method": "a", "runs": None}]}, "methods[0].runs must be int"),
        ({"base": ["x"]}, "base must be a mapping"),
    ],
)
def test_a_malformed_comparison_is_refused(folder, capsys, values, sentence):
    change(folder, **values)
    assert sentence in refused(capsys, "report", f"compare={folder}", f"out={folder}/page.html")
    assert not (folder / "page.html").exists()


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("compare.json", "{"),
        ("compare.json", "[1]"),
        ("compare.json", "[" * 100_000),
        ("starts.json", '{"names": ["a"], "values": {"1": [1, 2]}}'),
        ("starts.json", '{"names": ["a"], "values": {"1": ["x"]}}'),
        ("evaluations/base.json", '{"seeds": [1]}'),
        ("evaluations/base.json", '{"seeds": [1], "returns": ["x"], "lengths": [1], "terminated": [1]}'),
        ("evaluations/dsrl-0.json", json.dumps(to_data(Evaluation([1], [0.0], [1], [True], [False])))),
        ("runs/dsrl-0/config.yaml", "a: [b"),
        ("runs/dsrl-0/config.yaml", "- 1"),
        ("runs/dsrl-0/config.yaml", "a: &x {b: *x}"),
        ("runs/dsrl-0/metrics.jsonl", "1\n2\n"),
        ("runs/dsrl-0/metrics.jsonl", '{"step": 1, "kl": "high"}\n{"step": 2}\n'),
        ("runs/dsrl-0/metrics.jsonl", '{"step": 1, "kl": null}\n'),
    ],
)
def test_malformed_files_are_refused(folder, capsys, file, text):
    (folder / file).write_text(text)
    assert refused(capsys, "report", f"compare={folder}", f"out={folder}/page.html")
    assert not (folder / "page.html").exists()


def test_numbers_that_are_none_are_dashes(folder):
    nothing = dict.fromkeys(("final", "minutes", "low", "high", "area", "difference"))
    first_run(folder, **nothing, dip=math.nan)
    (folder / "compare.json").write_text(
        (folder / "compare.json").read_text().replace('"budget": 100000', '"budget": 1e999')
    )
    body = page(folder, "compare", "videos_mib=0").partition("<main>")[2]
    row = re.search(r"<h3>Every run.*?<tbody>.*?(<tr>.*?</tr>)", body, re.DOTALL)
    assert row and row[1].count(words.NOTHING) == 8, "five that are none, and three that older comparisons lack"
    assert not re.search(r">\s*(nan|inf|None)\b", body, re.IGNORECASE)
