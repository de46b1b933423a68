"""The command line: what works composes and is typed; what does not is one sentence, status 2, and nothing lost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from verb_lab import refused

from burnish.finetune.compare.compare import CompareConfig
from burnish.policies.__main__ import opponent
from burnish.policies.build import CheckpointConfig
from burnish.policies.cli.cli import VERBS, compose, main
from burnish.policies.cli.machine import prepare_machine
from burnish.policies.cli.settings_text import texts
from burnish.policies.core.errors import BurnishError
from burnish.policies.diffusion import Sampler
from burnish.policies.external.lerobot import LeRobotConfig
from burnish.policies.measure.evaluate import Evaluation

SMALL = ["policy.net.mlp.hidden=[16]", "train.steps=20", "train.save_every=10", "eval.episodes=4", "train.batch=16"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A dataset and a short training run, made once by the verbs themselves."""
    folder = tmp_path_factory.mktemp("lab")
    assert main(["collect", "env=two_mode", "expert=noisy", "episodes=12", f"out={folder}/data"]) == 0
    assert main(["pretrain", "policy=flow", f"data={folder}/data", f"out={folder}/run", *SMALL]) == 0
    return folder


def tree_hash(folder):
    digest = hashlib.sha256()
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file() and "tensorboard" not in p.parts):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_the_whole_path_works(lab, capsys):
    assert main(["evaluate", f"policy.path={lab}/run", "eval.episodes=4", "videos=1", f"out={lab}/eval"]) == 0
    assert "success" in capsys.readouterr().out
    assert len(Evaluation.load(lab / "eval/evaluation.json").seeds) == 4
    assert len(list((lab / "eval/videos").glob("seed_*.mp4"))) == 1
    words = [f"policy.path={lab}/run", f"against={lab}/run/checkpoints/00000010", "eval.episodes=4"]
    assert main(["evaluate", *words]) == 0
    assert "exact McNemar" in capsys.readouterr().out
    assert (
        main(
            ["collect", "env=two_mode", "policy=checkpoint", f"policy.path={lab}/run", "episodes=3", f"out={lab}/drawn"]
        )
        == 0
    )
    assert json.loads((lab / "drawn/meta/info.json").read_text())["total_episodes"] == 3


def test_a_policy_with_history_is_pretrained_evaluated_and_collected(lab, capsys):
    words = ["policy=gaussian", "policy.hidden=[16]", "chunk.history=2", "chunk.start=1", *SMALL[1:]]
    assert main(["pretrain", *words, f"data={lab}/data", f"out={lab}/two"]) == 0
    assert main(["evaluate", f"policy.path={lab}/two", "eval.episodes=3"]) == 0
    assert (
        main(
            [
                "collect",
                "env=two_mode",
                "policy=checkpoint",
                f"policy.path={lab}/two",
                "episodes=2",
                f"out={lab}/two_data",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pretrain", "train.lrr=1", "data=x"], "no setting 'train.lrr'; did you mean 'train.lr'"),
        (["pretrain", "polcy=flow", "data=x"], "no setting 'polcy'; did you mean 'policy'"),
        (["pretrain", "policy.stesp=3", "data=x"], "no setting 'policy.stesp'; did you mean 'policy.steps'"),
        (["pretrain", "policy=flo", "data=x"], "policy=flo is not a choice; did you mean 'flow'"),
        (["pretrain", "train.steps=many", "data=x"], "train.steps"),
        (["pretrain", "train.schedule=cosin", "data=x"], "train.schedule"),
        (["pretrain", "train.steps=-3", "data=x"], "train.steps=-3"),
        (["pretrain", "policy=shortcut", "policy.steps=3", "data=x"], "powers of two"),
        (["pretrain", "policy=diffusion", "policy.sampler=heun", "policy.eta=0.5", "data=x"], "policy.eta=0.5"),
        (["pretrain", "policy.net.guidance=2", "data=x"], "goal_drop"),
        (["pretrain"], "data=... must be given"),
        (["pretrain", "data"], "'data' is not a setting"),
        (["pretrain", "data=[1,"], "cannot read"),
        (["pretrain", "--data=x"], "settings have no dashes here: say data=x in place of --data=x"),
        (["pretrain", "data=nowhere"], "nowhere"),
        (["pretrain", "+extra=1", "data=x"], "settings can only be changed"),
        (["pretrain", "+policy.extra=1", "data=x"], "settings can only be changed"),
        (["evaluate"], "policy=... must be given"),
        (["evaluate", "policy.path=nowhere"], "nowhere"),
        (["evaluate", f"policy.path={__file__}"], "export its network by torch.onnx.export"),
        (["evaluate", "policy.path=model.onnx"], "there is no such folder"),
        (["compare", "base=x", "methods=dsrl", "env=insert"], "no choice of env here; write it into a file, world="),
        (["export", "policy.path=x", "env=insert"], "there is no choice of env here; leave it out"),
        (["compare", "base=x", "methods=dsrl", "robot=twin"], "there is no choice of robot here; leave it out"),
        (["deploy", "policy.path=x", "robot=twin", "foo=bar"], "settings is like it; --help lists them"),
        (["collect", "env=two_mod"], "env=two_mod is not a choice; did you mean 'two_mode'"),
        (["collect", "episodes=0"], "episodes=0"),
        (["pretrain", "data=x", "env.max_steps=3"], "choose env=... first"),
        (["pretrain", "data=x", "env.package=x"], "choose env=... first (gym|remote)"),
        (["pretrain", "data=[größe]"], "in quotes"),
        (["collect", "policy.path=x"], "x is not a checkpoint"),
        (["collect", "expert=nosy", "out=nothing"], "no expert of level 'nosy'"),
        (["collect", "policy=flow"], "this choice of policy is not for this verb; choices: checkpoint"),
        (["collect", "policy=checkpoint", "policy.path=x", "expert=clean"], "cannot both act"),
        (["collect", "out=/proc/nothing/here"], "/proc"),
        (["evaluate", "policy.path=x", "videos=-1", "out=y"], "videos=-1"),
        (["pretrain", "train.lr=nan", "data=x"], "train.lr=nan"),
        (["pretrain", "train.weight_decay=-1", "data=x"], "train.weight_decay=-1"),
        (["pretrain", "policy.net.guidance=nan", "policy.net.goal_drop=0.1", "data=x"], "guidance=nan"),
        (["pretrain", "device=mps", "data=x"], "device=mps"),
        (["pretrain", "threads=-3", "data=x"], "threads=-3"),
        (["doctor", "deep=true"], "there is no setting 'deep'"),
        (["doctor", "seconds=3"], "no world was named"),
        (["doctor", "env=gym", "env.id=CartPole-v1"], "kind Discrete"),
        (["refine"], "there is no verb 'refine'"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, *words)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("out=größe mit leer/réseau", "größe mit leer/réseau"),
        ("out=it's a#b;c=1", "it's a#b;c=1"),
        ("out=left, then right", "left, then right"),  # which Hydra takes for a sweep
        ("out=\\\\disk\\ö\\", "\\\\disk\\ö\\"),
        ("out='a b'", "a b"),  # quotes that a user wrote are Hydra's
        ("out=~/runs", str(Path.home() / "runs")),
        ("methods=dsrl,größe/m.yaml", ["dsrl", "größe/m.yaml"]),
        ('methods=["größe,1"]', ["größe,1"]),
    ],
)
def test_a_value_of_any_letters_arrives_as_it_was_typed(given, meant):
    import burnish.finetune.improve.__main__ as improve

    composed = compose("improve", improve.ImproveConfig, improve.GROUPS["improve"], [given])
    assert composed[given.partition("=")[0]] == meant


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chunk.execute=9"], "exceeds horizon=8"),
        (["device=cuda:9x"], "not a device"),
        (["policy.net.goal_drop=0.1"], "observes none"),
        (["train.execution=cudagraph"], "cudagraph needs a CUDA device"),
        (["env=lqr"], "the policy acts in 2 dimensions, the environment in 1"),
        (["env=point_reach", "env.dim=3"], "needs 'state' of shape (2,), but the environment gives (3,)"),
    ],
)
def test_impossible_combinations_leave_no_run_behind(lab, capsys, words, sentence, tmp_path):
    message = refused(capsys, "pretrain", f"data={lab}/data", f"out={tmp_path}/new", *words)
    assert sentence in message
    assert not (tmp_path / "new").exists()


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert prepare_machine("cuda:0", 0).index == 0
    with pytest.raises(BurnishError, match="cuda:1: torch finds 1 GPUs"):
        prepare_machine("cuda:1", 0)
    with pytest.raises(BurnishError, match="a task of on=slurm sees one GPU alone"):
        CompareConfig("base", ["dsrl"], on="slurm", device="cuda:1")


def test_an_existing_run_is_neither_overwritten_nor_continued_with_other_settings(lab, capsys):
    before = tree_hash(lab / "run")
    words = ["pretrain", f"data={lab}/data", f"out={lab}/run", *SMALL]
    assert "resume=true" in refused(capsys, *words)
    for verb, method in (("finetune", "rlpd"), ("offline", "iql")):  # before anything is read
        assert "is not empty" in refused(capsys, verb, f"method={method}", f"data={lab}/none", f"out={lab}/run")
    assert "train.lr" in refused(capsys, *words, "resume=true", "train.lr=0.5")
    assert tree_hash(lab / "run") == before


def test_a_path_that_cannot_be_written_is_said_before_the_work(lab, capsys, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    before = tree_hash(tmp_path)
    assert "file" in refused(capsys, "pretrain", f"data={lab}/data", f"out={tmp_path}/file/run", *SMALL)
    assert "file" in refused(capsys, "evaluate", f"policy.path={lab}/run", f"out={tmp_path}/file")
    assert "file" in refused(capsys, "collect", f"out={tmp_path}/file/data")
    assert tree_hash(tmp_path) == before


def test_a_moved_run_resumes_and_replaced_data_does_not(lab, capsys, tmp_path):
    words = ["policy=flow", *SMALL, "resume=true"]
    shutil.copytree(lab / "run", tmp_path / "run")
    assert main(["pretrain", f"data={lab}/data", f"out={tmp_path}/run", *words]) == 0
    assert main(["collect", "episodes=9", f"out={tmp_path}/data"]) == 0
    before = tree_hash(tmp_path / "run")
    assert "data_sha256" in refused(capsys, "pretrain", f"data={tmp_path}/data", f"out={tmp_path}/run", *words)
    assert tree_hash(tmp_path / "run") == before


def test_a_comparison_checks_both_first_and_is_kept(lab, capsys, tmp_path):
    words = ["evaluate", f"policy.path={lab}/run", "policy.steps=2", "eval.episodes=3", f"out={tmp_path}/eval"]
    assert "nowhere" in refused(capsys, *words, "against=nowhere")
    assert not list((tmp_path / "eval").iterdir())
    assert main([*words, f"against={lab}/run"]) == 0
    kept = {"about.json", "evaluation.json", "starts.json", "against.json", "comparison.json"}
    assert {p.name for p in (tmp_path / "eval").iterdir()} == kept
    assert json.loads((tmp_path / "eval/about.json").read_text())["world"]["name"] == "two_mode"
    assert main(words) == 0
    assert {p.name for p in (tmp_path / "eval").iterdir()} == {"about.json", "evaluation.json", "starts.json"}, (
        "nothing stale is left"
    )


def test_the_other_policy_of_a_comparison_has_settings_too():
    assert opponent("runs/bc") == CheckpointConfig("runs/bc")
    given = {"path": "act", "keys": {"image.front": "image.top"}, "stats": "set", "sampler": "ddim"}
    assert opponent(given) == CheckpointConfig("act", sampler=Sampler.ddim, keys=given["keys"], stats="set")
    assert opponent({"policy": "lerobot", "path": "act"}) == LeRobotConfig("act")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("{policy: remte, url: a}", "did you mean 'remote'"),
        ("{path: a, kyes: {}}", "did you mean 'keys'"),
        ("{keys: {a: b}}", "path, which must be given"),
        ("{path: 5}", "must be str"),
    ],
)
def test_settings_of_the_other_policy_that_fit_none_are_one_sentence(settings, said, lab, capsys):
    assert said in refused(capsys, "evaluate", f"policy.path={lab}/run", f"against={settings}")


def test_policies_of_two_worlds_are_not_pairs(lab, capsys):
    assert main(["collect", "env=two_mode", "env.noise=0.2", "episodes=4", f"out={lab}/rough"]) == 0
    assert main(["pretrain", "policy=flow", f"data={lab}/rough", f"out={lab}/rough_run", *SMALL]) == 0
    words = ["evaluate", f"policy.path={lab}/run", f"against={lab}/rough_run", "eval.episodes=3"]
    assert "different worlds" in refused(capsys, *words)
    assert main([*words, "env=two_mode"]) == 0


def test_help_offers_only_what_the_verb_can_use(capsys):
    offered = {}
    for verb in ("pretrain", "evaluate", "collect"):
        assert main([verb, "--help"]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("  policy="))
        offered[verb] = line.strip().removeprefix("policy=").split("|")
    assert offered["collect"] == ["checkpoint", "pi0", "smolvla"]
    assert offered["evaluate"] == ["callable", "checkpoint", "lerobot", "onnx", "pi0", "remote", "smolvla"]
    assert {"checkpoint", "flow", "shortcut", "diffusion"} <= set(offered["pretrain"]) and "onnx" not in offered[
        "pretrain"
    ]


@pytest.mark.parametrize("damage", ["flip", "truncate"])
@pytest.mark.parametrize("name", ["config.yaml", "state.safetensors", "manifest.json", "state.json"])
def test_a_damaged_checkpoint_is_named(lab, capsys, damage, name, tmp_path):
    shutil.copytree(lab / "run/checkpoints/00000020/policy", tmp_path / "policy")
    file = tmp_path / "policy" / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    else:
        del data[len(data) // 2 :]
    file.write_bytes(data)
    assert name in refused(capsys, "evaluate", f"policy.path={tmp_path}/policy")


def test_data_with_nan_names_its_episode(lab, capsys, tmp_path):
    shutil.copytree(lab / "data", tmp_path / "data")
    (file,) = (tmp_path / "data/data").rglob("*.parquet")
    table = pq.read_table(file)
    column = table.column("observation.state").to_pylist()
    column[3][1] = float("nan")
    place = table.column_names.index("observation.state")
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(column, type=field.type)), file)
    message = refused(capsys, "pretrain", f"data={tmp_path}/data", f"out={tmp_path}/run", *SMALL)
    assert "NaN" in message and "state" in message
    assert not (tmp_path / "run").exists()


def test_a_world_with_other_observations_is_refused(lab, capsys):
    message = refused(capsys, "evaluate", f"policy.path={lab}/run", "env=point_reach", "env.dim=3")
    assert "'state'" in message


def test_help_lists_groups_choices_and_settings(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert all(verb in overview for verb in VERBS)
    assert main(["pretrain", "policy=diffusion", "--help"]) == 0
    text = capsys.readouterr().out
    assert "policy=bins|checkpoint|diffusion|diffusion_unet|flow" in text and "env=ant|avoid|constant_reward" in text
    assert "policy.sampler=ddim  (ddpm|ddim|heun|dpm)" in text and "data=???" in text
    assert "_schema" not in text
    line = next(x for x in text.splitlines() if x.startswith("  policy.steps="))
    assert line.split(maxsplit=1)[1].startswith("K, levels visited"), "the text of a setting stands beside it"


def configurations(kind: type) -> Iterator[type]:
    """A dataclass of settings, and those that are its parts."""
    yield kind
    for field in dataclasses.fields(kind):
        part = field.default_factory() if callable(field.default_factory) else field.default
        if dataclasses.is_dataclass(part):
            yield from configurations(type(part))


# A text that begins so has left out its subject.
HEADLESS = re.compile(
    r"(and|at|between|by(?! default)|for|how|in|of|on|per|so|that|to|what|where|whether|which|who|whose|with|without)\b"
    r"|the (first|last) one|said aloud|\d+:|null:",
    re.IGNORECASE,
)


def settings(*kinds: type) -> set[type]:
    """All dataclasses of settings that a verb can show, and these."""
    found = set(kinds)
    for verb in VERBS.values():
        module, _, name = verb.entry.partition(":")
        entry = getattr(import_module(module), name)
        config = typing.get_type_hints(entry).get("config")
        found |= set(configurations(config)) if config else set()
        for choices in getattr(import_module(module), "GROUPS", {}).values():
            found |= {part for group in choices.values() for kind in group.values() for part in configurations(kind)}
    assert len(found) > 80
    return found


def test_every_setting_has_a_text():
    @dataclasses.dataclass
    class Silent:
        x: int = 1

    found = [(kind.__name__, x) for kind in settings(Silent) for x, text in texts(kind).items() if not text]
    assert found == [("Silent", "x")]


def test_the_text_of_a_setting_says_what_it_is():
    @dataclasses.dataclass
    class Riddles:
        length: float = 0.0  # length of the arm, in m
        share: float = 0.0  # of the greatest effort
        frozen_s: float = 0.0  # for so long
        margin_m: float = 0.0  # so far from all of these
        high: float = 0.0  # the last one
        consent: bool = False  # said aloud: it keeps its last set-point
        threads: int = 0  # 0: as torch chooses

    found = {
        f"{kind.__name__}.{x}: {text}"
        for kind in settings(Riddles)
        for x, text in texts(kind).items()
        if HEADLESS.match(text)
    }
    assert {each for each in found if not each.startswith("Riddles.")} == set()
    names = {each.split(".")[1].split(":")[0] for each in found}
    assert names == {"share", "frozen_s", "margin_m", "high", "consent", "threads"}


@pytest.mark.parametrize("words", [["help"], ["finetune", "--help"]])
def test_a_reader_that_leaves_early_ends_it_in_silence(words):
    command = [sys.executable, "-c", "from burnish.policies.cli.cli import main; raise SystemExit(main())", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)


def test_the_installed_command_exits_with_status_2():
    """Through a real process, because an exit status is what scripts see."""
    code = "import sys; from burnish.policies.cli.cli import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", code, "pretrain", "train.lrr=1"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and result.stdout == ""
