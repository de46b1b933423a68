"""Links planted for every output of every verb: no file outside is touched.

A verb is played once and watched, which tells all names under which it writes, those for a moment included. Then a
stranger prepares its folder: at every one of these names stands a link to a copy outside, or to where nothing is yet,
or a second name of a file outside. The verb is played again. A refusal names a link; that link is taken away, and the
verb is played again, until nothing is refused. So each name was refused, or stood there while the verb did its work.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import demand
from test_finetune_cli import SAC

from burnish.finetune import quickstart
from burnish.finetune.compare import free_baselines
from burnish.policies.cli import cli, executors
from burnish.policies.cli.cli import VERBS, main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.manifest import MANIFEST
from burnish.real_robot.serving.listening import ServerConfig, listen
from burnish.sim import view

pytestmark = pytest.mark.sim
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"
PLAYED = ["eval.episodes=2", "eval.worlds=2"]
EVALUATION = [*PLAYED, "eval.confirm=2"]
RUN = ["worlds=2", "total=16", "log_every=4", "save_every=8", "eval_every=8", *EVALUATION]
LOOP = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.updates_per_decision=0.5"]
NET = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.batch=8"]
FLOW = [*NET, *EVALUATION]
REFINED = ["finetune", "method=dsrl", "policy.path={lab}/bc", *RUN, *LOOP, *SAC]
FEW = ["budget=40", "episodes=2", "evaluations=1", "evaluation_episodes=2", "worlds=2", "videos=1", "jobs=1"]
COMPARED = ["compare", "base={lab}/bc", "methods={lab}/steady.yaml", "seeds=1", *FEW]
ROBOT = ["realtime=false", "episodes=1", "compare=false"]
RANDOM = re.compile(r"[.-][0-9a-f]{8}(?![0-9a-f])")  # nobody can have planted a link at a name that is drawn
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Play:
    """``{lab}`` is a folder with what a verb needs, ``{out}`` the one that a stranger prepares."""

    words: Sequence[str]
    again: Sequence[str] = ()
    depth: int = 99  # of the names at which links are planted

    @property
    def named(self) -> set[str]:
        """Places inside of ``{out}`` that the user names too: what they lead to is the user's own word."""
        return {word.partition("{out}/")[2] for word in self.words if "{out}/" in word}

    def __call__(self, lab: Path, out: Path, *more: str) -> int:
        return main([word.format(lab=lab, out=out) for word in (*self.words, *more)])


PLAYS = {
    "collect": Play(
        ["collect", "env=point_reach", "env.max_steps=6", "worlds=2", "sim_state=true", "out={out}/d", "episodes=2"],
        ["resume=true", "episodes=3"],
    ),
    "pretrain": Play(
        ["pretrain", *FLOW, "data={lab}/data", "train.steps=4", "train.save_every=2", "out={out}"], ["resume=true"]
    ),
    "offline": Play(
        [
            "offline",
            "method=iql",
            "data={lab}/data",
            "steps=4",
            "batch=8",
            "log_every=1",
            "save_every=1",
            *EVALUATION,
            "method.critic.hidden=[8]",
            "out={out}",
        ],
        ["resume=true"],
    ),
    "finetune": Play([*REFINED, "out={out}"], ["resume=true"]),
    "finetune, track": Play([*REFINED, "track=[rerun]", "out={out}"], ["resume=true"]),
    "finetune, keep_zip": Play(
        [
            "finetune",
            "method=sb3",
            "method.algo=PPO",
            "view=residual",
            "method.settings={{n_steps: 4, policy_kwargs: {{net_arch: [8]}}}}",
            "method.keep_zip=true",
            "policy.path={lab}/bc",
            *RUN,
            "out={out}",
        ],
        ["resume=true"],
    ),
    "distill": Play(
        [
            "distill",
            "teachers={lab}/bc",
            "episodes=2",
            "worlds=2",
            "keep=all",
            "rounds=1",
            *NET,
            *PLAYED,
            "train.steps=2",
            "train.save_every=1",
            "chunk.horizon=4",
            "chunk.execute=2",
            "out={out}",
        ],
        ["resume=true"],
    ),
    "distill, consolidate": Play(
        [
            "distill",
            "teachers={lab}/steered",
            "consolidate=true",
            "episodes=2",
            "worlds=2",
            "keep=all",
            "train.batch=8",
            "train.steps=2",
            "train.save_every=1",
            *PLAYED,
            "out={out}",
        ],
        ["resume=true"],
    ),
    "improve": Play(
        ["improve", "policy.path={lab}/bc", "methods={lab}/steady.yaml", "steps=40", *EVALUATION, "out={out}"],
        ["resume=true"],
    ),
    "doctor": Play(["doctor", "policy.path={lab}/bc", "worlds=2", "out={out}"]),
    "evaluate": Play(["evaluate", "policy.path={lab}/bc", "against={lab}/bc", *EVALUATION, "videos=1", "out={out}"]),
    "data": Play(["data", "convert", "{lab}/data", "out={out}/d"]),
    "data, show": Play(["data", "show", "{lab}/data", "out={out}/e.svg"]),
    "view": Play(["view", "env=two_mode", "episodes=1", "size=32", "out={out}"]),
    "compare": Play([*COMPARED, "out={out}"], ["resume=true"]),
    # Deeper are the runs, which other verbs write, each of which is played here by itself.
    "compare, data": Play([*COMPARED, "data={lab}/data", "out={out}"], ["resume=true"], depth=2),
    "report": Play(["report", "run={out}/run"]),
    "report of a comparison": Play(["report", "compare={out}/comparison"]),
    # What lies deeper is written by the verbs that it plays, each of which is played here by itself.
    "quickstart": Play(["quickstart", "out={out}"], depth=1),
    "export": Play(["export", "policy.path={lab}/bc", "out={out}/bundle"]),
    "record": Play(
        ["record", "env=reach", "supervisor=expert", "realtime=false", "episodes=1", "out={out}/d"],
        ["resume=true", "episodes=2"],
    ),
    "deploy": Play(["deploy", f"policy.path={BASE}", *ROBOT, "out={out}"]),
    "deploy, record": Play(["deploy", f"policy.path={BASE}", *ROBOT, "record={out}/set", "out={out}/told"]),
    "deploy, shadow": Play(["deploy", f"policy.path={BASE}", *ROBOT, "shadow=true", "out={out}"]),
}
OUTPUTS = {  # of the plays that are there for one setting
    "finetune, track": ("tracking.json", "rerun/00000000.rrd"),
    "finetune, keep_zip": ("sb3.zip",),
    "distill, consolidate": ("data/meta/info.json",),
    "compare, data": ("runs/iql-0.plan", "evaluations/more_imitation-0.json"),
    "deploy, record": ("set/meta/info.json",),
    "data": ("d/meta/info.json",),
}
QUICK = ("collect", "finetune", "evaluate", "view", "report", "export")  # of each kind of writer one
OTHERS = [pytest.mark.slow, pytest.mark.rotating(2)]
ELSEWHERE = {
    "serve": "below, a socket",
    "policies": "writes to the user's own folder of environments alone",
    "worlds": "writes to the user's own folder of environments alone",
}
KINDS = ("to a copy", "to where nothing is", "second name")


class InProcess:
    """Stands for a process of `burnish compare`: the same words, without the seconds that imports take."""

    def __init__(self, words, cores=0, **streams):
        self.returncode = main(words)

    def poll(self):
        return self.returncode


def viewer() -> ModuleType:
    """Stands for the package of Rerun, which not everybody has: a recording writes the file that it is told to."""
    module = ModuleType("rerun")
    recording = SimpleNamespace(
        save=lambda path: Path(path).write_text("begun\n"),
        **dict.fromkeys(("log", "set_time", "flush", "disconnect"), ignore),
    )
    module.__dict__.update(RecordingStream=lambda *_, **__: recording, TextDocument=ignore, Scalars=ignore)
    return module


def ignore(*_, **__):
    return None


@pytest.fixture(autouse=True)
def small(lab, monkeypatch):
    """The verbs that play verbs play small ones."""
    monkeypatch.setattr(view, "_can_open_windows", lambda: False)
    monkeypatch.setattr(executors, "start_verb", InProcess)
    monkeypatch.setattr(free_baselines, "PROBE", 4)
    monkeypatch.setitem(sys.modules, "rerun", viewer())
    run = cli.run

    def smaller(verb, words):
        told = [word for word in words if word.startswith(("out=", "data=", "base=", "compare=", "resume="))]
        if verb in PLAYS:
            given = {word.partition("=")[0] for word in told}
            shown = [word.format(lab=lab, out="-") for word in PLAYS[verb].words[1:]]
            told += [word for word in shown if word.partition("=")[0] not in (given | {"run"})]
        return run(verb, told)

    def typed(verb, *words):
        return smaller(verb, words)

    monkeypatch.setattr(quickstart, "_run", typed)


class Watch:
    """The names that are opened for writing, made or renamed below a folder, however short they last."""

    def __init__(self) -> None:
        self.root, self.seen = "", set[str]()
        sys.addaudithook(self)  # which cannot be taken off again

    def __call__(self, event: str, given: tuple) -> None:
        writes = event == "open" and isinstance(given[2], int) and given[2] & WRITING
        if self.root and (writes or event in ("os.mkdir", "os.rename", "os.link")):
            paths = [os.fsdecode(x) for x in given if isinstance(x, (str, bytes, os.PathLike))]
            self.seen |= {path for path in paths if path.startswith(self.root)}

    def names(self, play: Callable[[], int], root: Path) -> list[str]:
        self.root, self.seen = f"{root}/", set()
        assert play() == 0
        self.root = ""
        found = {Path(path) for path in self.seen} | set(root.rglob("*"))
        names = {path.relative_to(root).as_posix() for path in found if root in path.parents}
        return sorted(name for name in names if not RANDOM.search(name))


WATCH = Watch()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=4", f"out={folder}/data"]) == 0
    words = [f"data={folder}/data", "chunk.execute=4", "train.steps=5"]
    assert main(["pretrain", *FLOW, *words, f"out={folder}/bc"]) == 0
    settings = "method: {loop: {decisions_per_update: 10}, agent: {hidden: [8]}}\n"
    assert main([word.format(lab=folder) for word in (*REFINED, f"out={folder}/steered")]) == 0
    (folder / "steady.yaml").write_text(f"defaults: [override /method: residual_ppo]\nworlds: 2\n{settings}")
    return folder


def begun(name: str, lab: Path, out: Path) -> None:
    """What lies there before a verb is played for the first time."""
    if name == "report":
        shutil.copytree(lab / "bc", out / "run")
    elif name == "report of a comparison":
        assert PLAYS["compare"](lab, out / "comparison") == 0
    else:
        out.mkdir()


def snapshot(folder: Path) -> dict[str, tuple]:
    found = {}
    for path in [folder, *folder.rglob("*")]:
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[path.relative_to(folder).as_posix()] = (about.st_mtime_ns, about.st_mode, about.st_size, content)
    return found


def unfinished(whole: Path, out: Path) -> None:
    """As if it had been killed before its last checkpoint, so that there is something to do."""
    shutil.copytree(whole, out)
    if (out / "checkpoints").is_dir():
        shutil.rmtree(max((out / "checkpoints").iterdir()))


def plant(out: Path, outside: Path, whole: Path, names: Sequence[str], kind: str, spared: set[str]) -> set[str]:
    """A link at each name whose folder is there and is none; which names these were. ``outside`` has a copy of all."""
    shutil.copytree(whole, outside / "copy", symlinks=True)
    (outside / "absent").mkdir()
    planted = set()
    for name in names:
        path, copy = out / name, outside / "copy" / name
        if name in spared or not path.parent.is_dir() or any(p.is_symlink() for p in path.parents if out in p.parents):
            continue
        if not copy.exists():  # it lasted for a moment only
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text("precious\n")
        if kind == "second name" and copy.is_dir():
            continue
        if kind != "second name" and any((folder / MANIFEST).exists() for folder in (outside / "copy" / name).parents):
            continue  # in a checkpoint: these are refused when they are read, and are tried in test_checkpoint.py
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "second name":
            os.link(copy, path)
        else:
            path.symlink_to(copy if kind == "to a copy" else outside / "absent" / name.replace("/", "_"))
        planted.add(name)
    return planted


def named_in(said: str, out: Path, planted: set[str]) -> set[str]:
    """The planted names that a refusal is about: by path, by the name of a file, or in a folder that it names."""
    whole = {name for name in planted if re.search(rf"{re.escape(str(out / name))}(?![\w.-])", said)}
    if whole:
        return whole
    files = {name for name in planted if Path(name).suffix and re.search(rf"\b{re.escape(Path(name).name)}\b", said)}
    folders = re.findall(rf"{re.escape(str(out))}/([\w./-]+)", said)
    return files or {name for name in planted for folder in folders if name.startswith(f"{folder}/")}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=OTHERS) for name in PLAYS])
def test_links_at_every_output_lead_to_no_write_outside(name, lab, tmp_path, capfd):
    play, whole, root = PLAYS[name], tmp_path / "whole", tmp_path / "stranger"
    if "method=sb3" in play.words:
        demand("stable_baselines3")
    begun(name, lab, whole)
    names = WATCH.names(lambda: play(lab, whole), whole)
    names = [name for name in names if name not in play.named and name.count("/") < play.depth]
    assert names or name in ("report", "report of a comparison"), "it wrote nothing"
    refused: set[str] = set()
    for kind in KINDS:
        spared: set[str] = set()
        while True:
            shutil.rmtree(root, ignore_errors=True)
            out, outside = root / "out", root / "outside"
            root.mkdir()
            unfinished(whole, out)
            planted = plant(out, outside, whole, names, kind, spared)
            before = snapshot(outside)
            capfd.readouterr()
            status = play(lab, out, *play.again)
            said = capfd.readouterr().err.strip()
            assert snapshot(outside) == before, f"{kind}: {said}"
            if status == 0 or "exists already" in said:  # what refuses to be played twice touches nothing
                break
            about = named_in(said, out, planted)
            assert status in (1, 2) and about, f"a refusal that names nothing planted: {said}"
            spared |= about
        refused |= spared
    assert {*OUTPUTS.get(name, ())} <= {*names}, "control: it wrote what it is played for"
    sys.stderr.write(f"{name}: {len(names)} names; refused: {', '.join(sorted(refused)) or 'none'}\n")


def test_every_verb_is_played():
    assert {play.words[0] for play in PLAYS.values()} | set(ELSEWHERE) == set(VERBS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_takes_no_links_place(tmp_path, kind):
    """`burnish serve unix=...`: what is no socket of a dead server stays, and so does what it leads to."""
    (tmp_path / "file").write_text("precious\n")
    path = tmp_path / "socket"
    os.link(tmp_path / "file", path) if kind == "second name" else path.symlink_to(
        tmp_path / ("file" if kind == "to a copy" else "absent")
    )
    with pytest.raises(BurnishError, match="cannot be listened on"):
        listen(ServerConfig(unix=str(path)), None)
    assert (tmp_path / "file").read_text() == "precious\n" and not (tmp_path / "absent").exists()


def test_the_harness_sees_a_writer_that_follows_links(lab, tmp_path, monkeypatch, capfd):
    """Control: a page that is written as it used to be."""
    from burnish.finetune.compare.report import __main__ as report

    monkeypatch.setattr(report, "replace", lambda path, text: Path(path).write_text(text))
    with pytest.raises(AssertionError, match="to a copy: "):
        test_links_at_every_output_lead_to_no_write_outside("report", lab, tmp_path, capfd)
