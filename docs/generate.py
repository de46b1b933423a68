"""The generated parts of the documentation, read from the code: nothing of it is typed twice, so nothing drifts.

``methods`` is the list of pages, from the table `finetune/table.py`. ``generated`` writes
what stands below the hand-written part of one: what it needs, what its module says of itself and of its departures,
what was measured (`benchmarks/results/refine_quality/`), the experiments that are shipped, and its settings with the
comments of their dataclasses. `hook.py` puts all of it into the site while that is built.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from settings import folded, settings_tables, table

from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.build import has
from burnish.finetune.distillation.__main__ import DistillConfig
from burnish.finetune.method import Needs, Phase, Recorded
from burnish.finetune.methods.offline_to_online import Online
from burnish.finetune.table import METHODS
from burnish.offline.__main__ import OfflineConfig
from burnish.policies.build import build_policy
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs.manifest import plain_yaml

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
EXPERIMENTS = ROOT / "configs" / "experiment"


class Method(NamedTuple):
    """A page: ``module`` says what the method is, ``words`` choose it on the command line."""

    module: str
    words: str
    config: type | None  # None: the settings stand on the page of the method that this is a variant of
    doc: str
    needs: Needs | None = None
    recorded: Recorded | None = None
    online: str = ""  # the words that choose it in the world, of a method that begins with recordings


RECORDED = {
    Recorded.unused: "have no use: it learns from its own decisions",
    Recorded.played: "are a part of every batch, as decisions like its own (`data=FOLDER`)",
    Recorded.corrections: "are a part of every batch, as corrections of what the base would have done (`data=FOLDER`)",
    Recorded.ticks: "teach the model of the world, tick by tick (`data=FOLDER`)",
    Recorded.executed: "are read by `method.variant=aliased` alone, because nobody knows the noise behind them",
}


@cache
def methods() -> dict[str, Method]:
    found = {}
    for name, row in METHODS.items():
        module = importlib.util.resolve_name((row.build or row.learner).partition(":")[0], "burnish.finetune")
        found[name] = Method(module, f"finetune method={name}", row.config, row.doc, row.needs, row.recordings)
        if Phase.offline in row.phases:
            online = f"finetune method={name} data=FOLDER pretrain_updates=20000"
            found[name] = found[name]._replace(words=f"offline method={name}", config=row.offline, online=online)
        if name == "dsrl":
            found["dsrl_aliased"] = found[name]._replace(
                module="burnish.finetune.methods.dsrl_aliased",
                words="finetune method=dsrl method.variant=aliased",
                config=None,
                doc="DSRL whose critic knows actions, so that it can learn from recordings",
                recorded=Recorded.played,
            )
    doc = "several policies into one, or a refined one with its base into one piece"
    found["distill"] = Method("burnish.finetune.methods.distill", "distill", DistillConfig, doc)
    return found


# ---- what a module says of itself ----

ARXIV = re.compile(r"\b(\d{4}\.\d{4,5})\b")


def prose(text: str) -> str:
    """A docstring as Markdown: code in single backticks, papers as links. Indented drawings stay as they are."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if not block.startswith("    "):
            block = ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", block.replace("``", "`"))
        blocks.append(block)
    return "\n\n".join(blocks)


def said(module: str) -> tuple[str, str]:
    """The description that a module gives of itself, and its departures."""
    paragraphs = (inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")
    departures = [text for text in paragraphs if text.startswith("**Departures.**")]
    rest = [text for text in paragraphs if text not in departures]
    return prose("\n\n".join(rest)), prose("\n\n".join(departures)).removeprefix("**Departures.**").strip()


def beneath(module: str) -> list[str]:
    """The modules of ours that it is built on and that have departures of their own, without those with a page."""
    loaded = importlib.import_module(module)
    tree = ast.parse(inspect.getsource(loaded))
    package = module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            if name.startswith(("burnish.finetune.", "burnish.offline.")) and said(name)[1]:
                found.append(name)
    pages = {method.module for method in methods().values()}
    return sorted(set(found) - pages)


def path_of(module: str) -> str:
    return module.removeprefix("burnish.").replace(".", "/") + ".py"


# ---- experiments, and what was measured with them ----


@cache
def experiments() -> dict[str, list[Path]]:
    """Page -> its experiments: those of its own name, or else of its method."""
    found: dict[str, list[Path]] = {}
    for path in sorted(EXPERIMENTS.glob("*/*.yaml")):
        found.setdefault(page_of(path.stem), []).append(path)
    return found


def page_of(name: str) -> str:
    """Of an experiment: ``residual_sac`` is a way to run ``residual_td3``, and stands on its page."""
    if name in methods():
        return name
    for path in EXPERIMENTS.glob(f"*/{name}.yaml"):
        for choice in plain_yaml(path.read_text(encoding="utf-8"))["defaults"]:
            if "override /method" in choice:
                return choice["override /method"]
    raise LookupError(f"the experiment {name} chooses no method")


@cache
def quality() -> Any:
    """The benchmark's own module: its tables are made here by the functions that made the committed ones."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("refine_quality")
    finally:
        sys.path.remove(str(BENCHMARKS))


@cache
def measured() -> list[dict[str, Any]]:
    """Rows of methods; free baselines stand in the table of all methods alone."""
    return [row for row in quality().measured(RESULTS / "refine_quality") if row["family"] != "free"]


COLUMNS = ("task", "experiment", "budget", "seeds", "last", "worst seed", "gain", "over noise 0", "delivered")
COLUMNS += ("updates", "minutes")


def measured_table(page: str) -> str:
    rows = [row for row in measured() if page_of(row["method"]) == page]
    if not rows:
        return "No run of it in the committed comparison yet, so nothing is claimed."

    def interval(row: dict[str, Any], name: str) -> str:
        low = row[f"{name}_low"]
        return f"{row[name]:+.3f}" + ("" if low is None else f" (at least {low:+.3f})")

    cells = [
        (
            f"{row['task']}" + ("" if row["base"] == 1 else f" (base {row['base']})"),
            row["method"],
            f"{row['budget']:,}",
            str(row["seeds"]),
            f"{row['last']:.3f}",
            f"{row['worst_last']:.3f}",
            interval(row, "gain"),
            interval(row, "over_greedy"),
            "-" if row["delivered"] is None else f"{row['delivered']:.3f}",
            f"{row['gradient_steps']:,.0f}",
            "-" if row["minutes"] is None else f"{row['minutes']:.1f}",
        )
        for row in rows
    ]
    legend = (
        "Success rates on seeds that were used for nothing else; of running robots, which know no success, the return "
        "over that of D4RL's expert. *last* is the mean of the last policies, *gain* their paired difference from the "
        "base, *over noise 0* that from the base without noise, which costs nothing; *at least* is the lower end of "
        "the 95 % interval over runs and seeds. *delivered* is the policy that a run chooses, *updates* are gradient "
        "steps, *minutes* those of one core of the slowest run, where they are known. "
        "All methods: [results](../results.md#refine_quality)."
    )
    return f"{table(COLUMNS, cells)}\n\n{legend}"


def experiments_text(page: str) -> str:
    """Each experiment with the command that runs it, and what it changes; those that are another one in the world of a
    task are named below it."""
    found, included = [], []
    for path in experiments()[page]:
        name, text = f"{path.parent.name}/{path.stem}", path.read_text(encoding="utf-8")
        if f"- /experiment/sparse/{path.stem}" in text:
            included.append(f"`experiment={name}`")
            continue
        world = "gym env.id=..." if path.parent.name == "sparse" else path.parent.name
        nothing = path.stem in quality().FAMILIES["from nothing"]
        start = f"env={world}" if nothing else "policy.path=runs/bc"
        shown = f"```\nburnish finetune {start} experiment={name}\n```\n\n```yaml\n{text}```"
        found.append(folded("example", f"`experiment={name}`", shown))
    if included:
        found.append(
            f"`experiment=sparse/{page}` in the worlds of [public tasks](../worlds.md): {', '.join(included)}."
        )
    return "\n\n".join(found)


# ---- pages ----


def generated(page: str) -> str:
    """All that stands below what was written by hand."""
    method = methods()[page]
    what, departures = said(method.module)
    facts = []
    if method.needs is not None:
        whom = "its [view](../concepts.md#two-views) asks for" if method.needs is Needs.view else method.needs.value
        facts.append(
            (
                "Base",
                f"a policy that {whom.removesuffix(', or none at all')}"
                + (", or none at all" if method.needs.optional else ""),
            )
        )
    if method.recorded is not None:
        facts.append(("Recordings", RECORDED[method.recorded]))
    facts.append(("Command", f"`burnish {method.words} ...`"))
    if method.online:
        facts.append(("In the world", f"`burnish {method.online} ...`"))
    facts.append(("Code", f"[`{path_of(method.module)}`](../../{path_of(method.module)})"))
    sections = [
        table(("", ""), [(f"**{name}**", text) for name, text in facts]),
        f"## How it works\n\n{what}",
        f"## Departures from the paper\n\n{departures}",
    ]
    sections += [
        folded("note", f"Departures of what it is built on: `{path_of(name)}`", said(name)[1])
        for name in beneath(method.module)
    ]
    sections += [f"## Measured\n\n{measured_table(page)}"]
    if page in experiments():
        sections += [f"## Experiments\n\n{experiments_text(page)}"]
    if method.config is None:
        sections.append("## Settings\n\nThose of [DSRL](dsrl.md#settings), with `method.variant=aliased`.")
    else:
        prefix = "" if method.config is DistillConfig else "method."
        sections.append(f"## Settings\n\n{settings_tables(method.config, prefix)}")
    if method.online:
        about = said("burnish.finetune.methods.offline_to_online")[0]
        sections.append(f"## In the world\n\n{about}\n\n{settings_tables(Online, 'method.')}")
    return "\n\n".join(sections)


def bases() -> dict[str, Any]:
    """Kinds of base, each as small as it can be."""
    spec = PolicySpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0,), (1.0,)), horizon=2, execute=1)
    noisy = dataclasses.replace(spec, noise_shape=spec.chunk_shape)
    return {
        "flow": build_policy(FlowConfig(), spec),
        "diffusion": build_policy(DiffusionConfig(), spec),
        "Gaussian": build_policy(GaussianConfig(), spec),
        "Gaussian with tanh": build_policy(GaussianConfig(squash=True), spec),
        "black box that takes noise": CallablePolicy(lambda obs, noise: noise, noisy),
        "black box": CallablePolicy(lambda obs: obs, spec),
        "none": None,
    }


def overview() -> str:
    """Which base fits which method, by the function that refuses the others."""
    kinds = bases()
    rows = []
    for page, method in methods().items():
        if method.needs is not None:
            marks = ["yes" if has(base, method.needs) else "" for base in kinds.values()]
            rows.append((f"[{page}]({page}.md)", *marks))
    others = [(f"[{page}]({page}.md)", method.doc) for page, method in methods().items()]
    return "\n\n".join(
        [
            "## All of them",
            table(("method", "in a sentence"), others),
            "## Which base fits",
            "A method asks a base for what it uses and for nothing else. This table is made by the function that "
            "refuses the others; a base with a blank gets a list of the methods that could refine it.",
            table(("method", *kinds), rows),
            "## Settings of every refinement",
            "`burnish finetune`:\n\n" + settings_tables(FinetuneConfig, ""),
            "`burnish offline`:\n\n" + settings_tables(OfflineConfig, ""),
        ]
    )


def results() -> str:
    """The tables that the benchmarks wrote, each under the name of its file."""
    found = []
    for path in sorted(RESULTS.glob("*.md"), key=lambda path: (path.stem != "refine_quality", path.stem)):
        if "_quick" not in path.stem:  # those are looks, not measurements
            found.append(f"## {path.stem} {{ #{path.stem} }}\n\n{path.read_text(encoding='utf-8').strip()}")
    return "\n\n".join(found)
