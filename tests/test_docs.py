"""The documentation: every page is in the navigation, every method has one, what is generated says what the code says,
every command composes, every piece of Python runs, and the site asks no other host for anything.

``make docs`` builds the site with warnings as errors, so broken links between pages are found there.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import demand

from burnish.finetune.methods.dsrl import DSRLConfig
from burnish.finetune.table import METHODS
from burnish.policies.cli.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hook() -> Any:
    demand("mkdocs")
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("hook")
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def generate(hook) -> Any:
    return hook.generate


@pytest.fixture(scope="module")
def settings(hook) -> Any:
    return importlib.import_module("settings").settings  # beside the hook, which has loaded it


@pytest.fixture(scope="module")
def pages(hook) -> dict[str, str]:
    """Address -> all that the page will say."""
    return {uri: text for uri, (text, _) in hook.pages().items() if uri != "plan.md"}


def entries(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [entry for item in (nav.values() if isinstance(nav, dict) else nav) for entry in entries(item)]


def navigation() -> list[Any]:
    """That of mkdocs.yml, without the methods."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


@pytest.mark.slow
def test_every_page_is_in_the_navigation_once(hook, pages):
    assert sorted(entries(hook.with_methods(navigation()))) == sorted(pages)


def test_a_page_of_a_method_joins_the_group_that_it_names(hook, tmp_path):
    for name, text in {
        "index": "# Methods",
        "first": "---\ngroup: Training the chain\norder: 1\n---\n# First",
        "second": "---\ngroup: Training the chain\norder: 2\n---\n# Second",
        "new": "---\ngroup: Training the chain\n---\n# New",
        "alone": "# Alone",
    }.items():
        (tmp_path / f"{name}.md").write_text(text)
    methods = next(item["Methods"] for item in hook.with_methods(navigation(), tmp_path) if "Methods" in item)
    assert {"Training the chain": [f"methods/{name}.md" for name in ("first", "second", "new")]} in methods
    assert methods[0] == "methods/index.md" and methods[-1] == "methods/alone.md"
    assert entries(methods).count("methods/index.md") == 1
    (tmp_path / "new.md").write_text("---\ngroup: Training the chian\n---\n# New")
    with pytest.raises(hook.PluginError, match="Training the chian"):
        hook.with_methods(navigation(), tmp_path)


def test_every_method_has_its_page_with_a_part_written_by_hand(generate):
    expected = {*METHODS, "dsrl_aliased", "distill"}
    assert set(generate.methods()) == expected
    assert {path.stem for path in (DOCS / "methods").glob("*.md")} == expected | {"index"}
    for name in expected:
        text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert len(text.partition("## When to pick it")[2]) > 200, f"{name} does not say when to pick it"


# ---- what is generated ----


@dataclass
class Inner:
    depth: int = 3  # how deep


@dataclass
class Outer(Inner):
    # In metres,
    # never in feet.
    height: float | None = None
    inner: Inner = field(default_factory=lambda: Inner(depth=7))
    plain: bool = False


def test_settings_are_the_fields_their_defaults_and_their_comments(settings):
    assert settings(Outer, "x.") == [
        ("x.depth", "`3`", "how deep"),
        ("x.height", "`null`", "In metres, never in feet."),
        ("x.inner.depth", "`7`", "how deep"),  # that of the instance, not that of its class
        ("x.plain", "`false`", ""),
    ]
    known = {setting.name: setting for setting in settings(DSRLConfig, "method.")}
    assert known["method.bound"] == ("method.bound", f"`{DSRLConfig().bound}`", "bound of each coordinate of the noise")
    assert known["method.sac.target_entropy"].default == "`0.0`", "DSRL's own, where that of SAC is null"
    assert known["method.variant"].default == "`sac` (or `aliased`)"


def test_a_page_says_what_module_dataclass_results_and_experiments_say(settings, generate, pages):
    for name, method in generate.methods().items():
        text = pages[f"methods/{name}.md"]
        departures = generate.said(method.module)[1]
        assert departures and departures in text, f"{method.module} says nothing of departures"
        prefix = "" if name == "distill" else "method."
        for setting in settings(method.config, prefix) if method.config else []:
            assert f"| `{setting.name}` | {setting.default.replace('|', '')}" in text
        rows = [row for row in generate.measured() if generate.page_of(row["method"]) == name]
        assert ("nothing is claimed" in text) == (not rows)
        assert all(
            f"| {row['method']} | {row['budget']:,} | {row['seeds']} | {row['last']:.3f}" in text for row in rows
        )


def test_a_measured_row_stands_on_the_page_of_its_method_alone(generate, monkeypatch):
    row = {"task": "push", "base": 1, "budget": 100_000, "method": "residual_sac", "seeds": 5, "last": 0.7}
    row |= {"worst_last": 0.6, "gain": 0.3, "gain_low": 0.2, "over_greedy": 0.1, "over_greedy_low": None}
    row |= {"delivered": 0.65, "gradient_steps": 5000, "minutes": 2.5}
    monkeypatch.setattr(generate, "measured", lambda: [row])
    line = "| push | residual_sac | 100,000 | 5 | 0.700 | 0.600 | +0.300 (at least +0.200) | +0.100 | 0.650 | 5,000 |"
    assert line in generate.measured_table("residual_td3")
    assert "nothing is claimed" in generate.measured_table("dsrl")


def test_every_experiment_stands_on_one_page(generate):
    shown = [path for paths in generate.experiments().values() for path in paths]
    assert sorted(shown) == sorted((ROOT / "configs" / "experiment").glob("*/*.yaml"))
    assert set(generate.experiments()) <= set(generate.methods())
    assert generate.page_of("residual_sac") == "residual_td3"
    with pytest.raises(LookupError):
        generate.page_of("nothing_of_this_name")


def test_departures_beneath_a_method_are_found_by_its_imports(generate):
    assert generate.beneath("burnish.finetune.methods.dppo") == [
        "burnish.finetune.actors.denoising",
        "burnish.finetune.ppo",
    ]
    assert generate.beneath("burnish.finetune.methods.dsrl") == ["burnish.offline.sac"], (
        "dsrl_aliased has a page of its own"
    )


# ---- what is promised to a reader ----


@pytest.mark.slow
def test_commands_are_verbs_and_settings_that_exist(capsys):
    """Those that were written by hand; the generated ones are made of the names of the tables and of the files."""
    texts = [path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")]
    texts = [text.replace("\\\n", " ") for text in texts]
    lines = {line for text in texts for line in re.findall(r"^burnish \w+[^`\n]*$", text, re.MULTILINE)}
    assert {line.split()[1] for line in lines} >= {"collect", "pretrain", "evaluate", "finetune", "offline", "distill"}
    for line in sorted(lines):
        verb, *words = shlex.split(line, comments=True)[1:]
        assert verb in VERBS, line
        # --help composes the settings, so a name that does not exist is refused.
        assert main([verb, *words, "--help"]) == 0, line
    assert main(["finetune", "method=dsrl", "method.bond=1", "--help"]) == 2, "the check must be able to fail"
    capsys.readouterr()


@pytest.mark.parametrize("page", ["checkpoint", "environment", "data"])
def test_python_runs_as_printed(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), f"{page}.md", "exec"), {})
    capsys.readouterr()


def test_links_of_the_pages_as_they_lie_lead_somewhere():
    made = {"results.md"}  # while the site is built
    broken = []
    for path in DOCS.rglob("*.md"):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text):
            file = (path.parent / target).resolve()
            if not file.exists() and file.relative_to(DOCS).as_posix() not in made:
                broken.append(f"{path.name}: {target}")
    assert broken == []


# ---- the way into the site ----


def test_links_out_of_the_documentation_lead_to_pages_of_the_site(hook):
    text = (
        "[a](../benchmarks/results/bases.md) [b](../CONTRIBUTING.md#tests) [c](../configs/experiment/insert/dsrl.yaml)"
    )
    moved, wanted = hook.relinked(text + " [d](concepts.md) [e](https://arxiv.org)", "methods/dsrl.md", DOCS)
    assert re.findall(r"\((.*?)\)", moved) == [
        "../results.md#bases",
        "../contributing.md#tests",
        "../source/configs/experiment/insert/dsrl.yaml.md",
        "../concepts.md",
        "https://arxiv.org",
    ]
    assert wanted == {ROOT / "configs/experiment/insert/dsrl.yaml"}
    assert "rewards: {shift: -1}" in hook.shown(*wanted)
    assert hook.relinked("[gone](../no/such/file)", "index.md", DOCS) == ("[gone](../no/such/file)", set())


def test_drawings_are_laid_in_with_the_words_that_describe_them(hook):
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    laid_in = hook.drawn(text, DOCS)
    assert text.count("drawings/") == laid_in.count("<svg") == laid_in.count('role="img" aria-label="') == 3
    assert "drawings/" not in laid_in


def test_a_page_that_asks_another_host_is_noticed(hook):
    clean = '<a href="https://arxiv.org">x</a><img src="a.png"><link href="site.css"><svg xmlns="http://www.w3.org/2000/svg"/>'
    assert hook.requests(clean) == []
    for page in (
        '<script src="https://unpkg.com/x.js"></script>',
        "<img src='//cdn.example/x.png'>",
        '<link rel="stylesheet" href="https://fonts.googleapis.com/css">',
        '<iframe src="http://example.org"></iframe>',
        '<pre class="mermaid"></pre>',
    ):
        assert len(hook.requests(page)) == 1, page
    assert hook.STYLE.findall(
        "@import 'https://a.example/b.css'; x { background: url(//c.example/d.png) url(e.png) }"
    ) == [
        "https://a.example/b.css",
        "//c.example/d.png",
    ]


def test_ci_builds_the_site_and_counts_warnings():
    """With --quiet, mkdocs neither shows warnings nor fails by them."""
    recipe = re.search(r"^docs: venv.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None and recipe[1].endswith("mkdocs build --strict")
    assert re.search(r"^stage .* make .*\bdocs\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_asks_no_other_host(hook, tmp_path):
    build, config = importlib.import_module("mkdocs.commands.build"), importlib.import_module("mkdocs.config")
    loaded = config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build.build(loaded)
    assert hook.foreign(tmp_path) == []
    (tmp_path / "evil.html").write_text('<script src="https://example.org/x.js"></script>')
    assert hook.foreign(tmp_path) == ["evil.html: https://example.org/x.js"]
    page = (tmp_path / "methods" / "dsrl.html").read_text(encoding="utf-8")
    assert "method.bound" in page and "Departures from the paper" in page
    assert not (tmp_path / "plan.html").exists() and not list(tmp_path.glob("*.py"))


def test_tests_that_contributors_are_pointed_to_are_there():
    named = set(re.findall(r"tests/\w+\.py", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert len(named) > 20, "the table of holes and hazards was not found"
    assert not {name for name in named if not (ROOT / name).is_file()}


def test_the_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(targets) >= 4
    assert [target for target in targets if not (ROOT / target).exists()] == []
