"""``burnish finetune`` and ``burnish offline``: they resume to the same end, save what deploys, and refuse well."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from verb_lab import imitating, refused

from burnish.finetune import api
from burnish.finetune.loops import OffPolicy, OnPolicyConfig
from burnish.finetune.method import Recorded
from burnish.finetune.refinement import refinement
from burnish.finetune.table import METHODS, OFFLINE, ONLINE, method_of
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.spec import ActionSpec
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env

EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
RUN = ["worlds=2", "total=24", "log_every=4", "save_every=8", *EVALUATION]
NEEDED = {"dppo": ["method.trained_steps=2"], "rpd": ["method.execute=2"]}
SAC = ["method.sac.critic.hidden=[8]", "method.sac.critic.members=2", "method.sac.agent.hidden=[8]"]
NEEDED |= dict.fromkeys(("dsrl", "rfs", "rlpd"), SAC) | {"rlif": [*SAC, "expert=noisy"], "dagger": ["expert=noisy"]}
NEEDED["residual_td3"] = [*(word.replace("sac", "td3") for word in SAC), "method.loop.initial_updates=1"]
# Trials of 40 episodes, of at most 12 ticks and 3 decisions, in which at least ten succeed and ten fail.
IMAGINED = ["worlds=4", "total=240", "env=point_reach", "env.max_steps=12", "env.radius=0.8", "method.collect=40"]
IMAGINED += ["method.imagined=24", "method.imagined_worlds=2", "method.model.updates=60", "method.model.hidden=[8]"]
IMAGINED += ["method.inner.loop.warmup=8", "method.inner.loop.batch=8", *(w.replace("d.", "d.inner.", 1) for w in SAC)]
MIXED = ["method.imagined_worlds=4", "method.rollouts=2", "method.refit=6", "method.refit_updates=2"]
MIXED += ["method.capacity=40", "method.model.hidden=[8]", "method.model.updates=5", *IMAGINED[-5:]]
MIXED += ["method.depth.last=3", "method.depth.end=20"]
NEEDED["expo"] = ["method.critic.hidden=[8]", "method.edit.hidden=[8]", "method.count=2"]
NEEDED |= {name: ["method.critic.hidden=[8]"] for name in OFFLINE}
FROM_NOTHING = ("gaussian_ppo", "grpo", "rlpd", "rlif", "mbpo", "tdmpc", "serene")
# Everything is rewarding, so a period of search is followed by one of emitters.
SEARCHED = ["env.max_steps=2", "method.population=2", "method.period=4", "method.emitter=2", "method.rewarding=-1e6"]
NEEDED["grpo"] = ["method.group=2", "env.max_steps=4"]
NEEDED["recap"] = ["method.value.hidden=[8]", "method.flow.net.mlp.hidden=[8]", "method.head_start=2"]
# Offline to online in one command: 60 updates from recordings are two iterations, before anything is played.
FIRST = {f"{name} online": ["method.critic.hidden=[8]"] for name in OFFLINE}
FIRST["recap online"] = [*NEEDED["recap"]]
FIRST["cql online"] += ["method.calibrate=true", "method.count=2"]
FIRST["q_chunking online"] += ["method.count=2", "method.flow.net.mlp.hidden=[8]"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Recordings, and a flow and a Gaussian that imitate them a little."""
    folder = imitating(tmp_path_factory.mktemp("lab"), *EVALUATION, name="flow")
    words = [f"data={folder}/data", "train.steps=5", "train.batch=8", *EVALUATION]
    assert main(["pretrain", "policy=gaussian", "policy.hidden=[8]", f"out={folder}/gaussian", *words]) == 0
    return folder


def words_of(lab, name):
    """The command of a method, small."""
    if name in OFFLINE:
        small = ["steps=12", "batch=8", "log_every=2", "save_every=4", *EVALUATION]
        return ["offline", f"method={name}", f"data={lab}/data", *small, *NEEDED[name]]
    more, name = FIRST.get(name, NEEDED.get(name, [])), name.removesuffix(" online")
    method = METHODS[name]
    if name == "imagine":
        return ["finetune", "method=imagine", f"policy.path={lab}/flow", *RUN, "save_every=40", *IMAGINED]
    if name == "mbpo":
        return ["finetune", "method=mbpo", "env=point_reach", f"data={lab}/data", *RUN, *MIXED]
    if name == "serene":
        return ["finetune", "method=serene", "env=point_reach", *RUN, *SEARCHED]
    if isinstance(method.config().loop, OnPolicyConfig):
        ppo = "method.inner.ppo" if name == "grpo" else "method.ppo"
        small = ["method.loop.decisions_per_update=4", f"{ppo}.minibatch=4", f"{ppo}.epochs=1"]
    else:
        small = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.updates_per_decision=0.5"]
    start = (
        ["env=point_reach"] if name in (*FROM_NOTHING, *OFFLINE) else ["policy=checkpoint", f"policy.path={lab}/flow"]
    )
    reads = method_of(method.config()).recordings is not Recorded.unused
    data = [f"data={lab}/data"] if reads else []
    pretrain = ["pretrain_updates=60"] if name in OFFLINE else []
    return ["finetune", f"method={name}", *start, *data, *pretrain, *RUN, *small, *more]


def contents(checkpoint):
    """Everything that a later step could depend on, byte by byte."""
    files = [p for p in sorted(checkpoint.rglob("*")) if p.suffix == ".safetensors" or p.name == "state.json"]
    assert {p.parent.name for p in files} >= {"policy", "learner"}
    return {p.relative_to(checkpoint).as_posix(): p.read_bytes() for p in files}


def lines(run):
    """What was logged, without the clock."""
    return [{k: repr(v) for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(run)]


# One of each kind of loop, view and start; the others are as much alike as their seam tests say, and are slow together.
QUICK = ("reinflow", "dsrl", "residual_td3", "rlpd", "iql", "cql online")
CASES = [name for name in (*METHODS, *FIRST) if name != "sb3"]
NAMES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_is_uninterrupted_and_what_is_saved_acts(lab, tmp_path, name):
    words = words_of(lab, name)
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    *_, middle, last = sorted((tmp_path / "whole/checkpoints").iterdir())
    # A process that dies after the checkpoint in the middle has logged more than it saved.
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints" / last.name)
    assert main([*words, f"out={tmp_path}/killed", "resume=true"]) == 0
    resumed = tmp_path / "killed/checkpoints" / last.name
    assert contents(resumed) == contents(last) != contents(middle)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert main(["evaluate", f"policy.path={tmp_path}/whole", *EVALUATION]) == 0
    _, origin = load_policy(tmp_path / "whole")
    assert origin["method"] == name.removesuffix(" online") and origin["env"]["name"] == "point_reach"
    tried = [line for line in read_metrics(tmp_path / "whole") if "eval/episodes" in line]
    before = [2] if name in FIRST else [] if name in FROM_NOTHING or name in OFFLINE else [0]
    assert [int(line["step"]) for line in tried] == [*before, int(last.name)]


def test_an_actor_from_nothing_commands_the_whole_of_its_actuators(lab, tmp_path):
    """Its actions are in [-1, 1]; whoever loads it must know which limits these stand for."""
    words = [word for word in words_of(lab, "gaussian_ppo") if word != "env=point_reach"]
    assert main([*words, "env=point_reach", "env.order=acceleration", f"out={tmp_path}/run"]) == 0
    policy, origin = load_policy(tmp_path / "run")
    assert policy.spec.action == make_env("point_reach", 1).spec.action.__class__((-4.0, -4.0), (4.0, 4.0))
    assert origin["env"]["config"]["order"] == "acceleration"


def test_offline_starts_from_a_checkpoint(lab, tmp_path):
    words = [*words_of(lab, "iql"), "policy=checkpoint", f"policy.path={lab}/gaussian", "chunk.execute=2"]
    assert main([*words, f"out={tmp_path}/run"]) == 0
    policy, _ = load_policy(tmp_path / "run")
    assert policy.config.hidden == [8] and policy.spec.execute == 4  # its own chunk, whatever a fresh one would have
    assert [int(line["step"]) for line in read_metrics(tmp_path / "run") if "eval/episodes" in line] == [0, 12]


def test_a_base_is_probed_and_recordings_are_summed_up_in_a_sentence_each(lab, tmp_path, capsys):
    data = f"data={lab}/data"
    assert main([*words_of(lab, "dsrl"), "method.variant=aliased", data, f"out={tmp_path}/steered"]) == 0
    out, _ = capsys.readouterr()
    assert "probe of the base: the noise moves an action by" in out and "prior data: 72 decisions\n" in out
    assert main([*words_of(lab, "residual_td3"), f"out={tmp_path}/corrected"]) == 0
    assert "% of their coordinates lie further than bound=0.1 from the base" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_limits_of_a_base_within_those_of_its_world_are_told(lab, share):
    base, told = load_policy(lab / "flow")[0], list[str]()
    limits = base.spec.action
    narrow = ActionSpec(*(tuple(share * x for x in side) for side in (limits.low, limits.high)))
    base.spec = replace(base.spec, action=narrow)
    config, _ = api._configured("point_reach", "residual_ppo", {"total": 100})
    refinement(config, base, tried=False, tell=told.append)
    assert ("[-0.5, 0.5] (also in dimensions 1)" in "".join(told)) == (share < 1)


@pytest.mark.parametrize("shift", [0, 100])  # without a shift nothing is earned: each tick costs its distance
def test_rewards_are_changed_in_the_world_and_in_recordings(lab, shift):
    start = {"data": f"{lab}/data", "worlds": 8, "loop": {"warmup": 8, "batch": 64, "prior_share": 0.5}}
    config, _ = api._configured("point_reach", "rlpd", {**start, "total": 100, "rewards": {"shift": shift}})
    _, loop = refinement(config)
    assert isinstance(loop, OffPolicy)
    for _ in range(3):
        loop.iterate()
    reward = loop.source.sample(64)["reward"]  # half of it was recorded
    assert bool(((reward > 90) == (shift == 100)).all())


def test_a_base_that_ignores_its_noise_is_refused(lab, tmp_path, capsys):
    deaf = ["policy=gaussian", "policy.hidden=[8]", "policy.init_std=2e-5", "policy.min_std=1e-5"]
    words = [f"data={lab}/data", "train.steps=1", "policy.loss=least_squares", *EVALUATION]
    assert main(["pretrain", *deaf, *words, f"out={tmp_path}/deaf"]) == 0
    for name in ("dsrl", "rfs"):
        words = [word.replace(f"{lab}/flow", f"{tmp_path}/deaf") for word in words_of(lab, name)]
        message = refused(capsys, *words, f"out={tmp_path}/run")
        assert f"method={name} steers its base by noise, but this base ignores its noise" in message
        assert "method=residual_td3" in message and not (tmp_path / "run").exists()


def test_a_base_is_corrected_from_noise_0_where_that_is_said(lab, tmp_path, capsys):
    """Its draws are what any other method asks for, so no other one takes it."""
    start = [f"policy.path={lab}/flow", "policy.greedy=true", *RUN]
    small = ["method=residual_td3", "method.loop.warmup=8", "method.loop.batch=8", *NEEDED["residual_td3"]]
    assert main(["finetune", *start, *small, f"out={tmp_path}/run"]) == 0
    said = capsys.readouterr()
    assert "24/24" in said.err and " decisions/s" in said.err, "in the unit of total=, not in iterations"
    assert f"against={{path: {lab}/flow, greedy: true}}" in said.out, "what it began with"
    policy, _ = load_policy(tmp_path / "run")
    obs = {key: torch.zeros(2, *shape) for key, shape in policy.spec.obs.shapes.items()}
    flow = api.load(lab / "flow")
    drawn, still = (
        flow.act(obs, greedy=greedy, generator=torch.Generator().manual_seed(1)) for greedy in (False, True)
    )
    found = policy.base.act(obs, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, still) and not torch.allclose(found, drawn)
    assert main(["finetune", *start, "method=dsrl", f"out={tmp_path}/other"]) == 2
    assert "needs a policy that takes its noise from outside" in capsys.readouterr().err


def test_a_policy_that_diverged_is_not_saved(lab, tmp_path, capsys):
    words = [f"policy.path={lab}/flow", *RUN, "method=residual_td3", "method.loop.warmup=8", "method.loop.batch=8"]
    words += [
        *NEEDED["residual_td3"],
        "rewards.scale=1e38",
        "method.loop.updates_per_decision=2",
        f"out={tmp_path}/run",
    ]
    assert "training has diverged: " in refused(capsys, "finetune", *words)
    kept, _ = load_policy(tmp_path / "run")
    assert all(x.isfinite().all() for x in kept.parameters()), "that of the warm-up"


def test_another_base_at_the_same_place_is_noticed(lab, tmp_path, capsys):
    shutil.copytree(lab / "flow", tmp_path / "base")
    words = [w.replace(f"{lab}/flow", f"{tmp_path}/base") for w in words_of(lab, "residual_ppo")]
    assert main([*words, f"out={tmp_path}/run"]) == 0
    shutil.move(tmp_path / "base", tmp_path / "moved")
    moved = [w.replace(f"{tmp_path}/base", f"{tmp_path}/moved") for w in words]
    assert main([*moved, f"out={tmp_path}/run", "resume=true"]) == 0  # the same weights elsewhere are the same base
    shutil.copytree(lab / "gaussian", tmp_path / "base")
    assert "identity.policy" in refused(capsys, *words, f"out={tmp_path}/run", "resume=true")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["finetune"], "method=... must be given"),
        (["finetune", "method=reinflo"], "method=reinflo is not a choice; did you mean 'reinflow'"),
        (["finetune", "method=iql", "env=point_reach"], "method=iql begins with recordings or with a policy"),
        (
            ["finetune", "method=rlpd", "env=point_reach", "pretrain_updates=5"],
            "pretrain_updates=5 learn from recordings",
        ),
        (["offline", "data=x", "method=dppo"], "this choice of method is not for this verb"),
        (["offline", "method=iql"], "data=... must be given"),
        (["offline", "method=iql", "data=nowhere"], "no dataset at nowhere"),
        (["offline", "method=iql", "data=x", "rewards.scale=0"], "rewards.scale=0"),
        (["offline", "method=iql", "data=x", "rewards.scale=nan"], "rewards.scale=nan"),
        (["offline", "method=iql", "data=x", "rewards.shift=inf"], "rewards.shift=inf"),
        (["finetune", "method=dppo", "total=0"], "total=0"),
        (["finetune", "method=dppo", "method.ppo.epocs=2"], "did you mean 'method.ppo.epochs'"),
        (["finetune", "method=dppo", "method.ppo.clip=-1"], "clip=-1"),
        (["finetune", "method=rlpd"], "give env=..."),
        (["finetune", "method=dppo"], "needs a policy that exposes its generation chain; no policy was given"),
        (["finetune", "method=dppo", "policy=checkpoint", "policy.path=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert sentence in refused(capsys, *words)


@pytest.mark.parametrize(
    ("base", "words", "sentence"),
    [
        ("gaussian", ["method=reinflow"], "method=reinflow needs a policy that is a flow; the one given"),
        ("gaussian", ["method=dppo"], "Try method=gaussian_ppo, method=residual_ppo"),
        ("flow", ["method=dppo", "data={lab}/data"], "learns from its own decisions alone"),
        ("flow", ["method=dsrl", "data={lab}/data"], "take method.variant=aliased"),
        ("flow", ["method=expo", "data=nowhere"], "no dataset at nowhere"),
        ("flow", ["method=residual_ppo", "env=lqr"], "the environment"),
    ],
)
def test_impossible_combinations_leave_no_run_behind(lab, capsys, tmp_path, base, words, sentence):
    start = ["policy=checkpoint", f"policy.path={lab}/{base}", f"out={tmp_path}/run"]
    assert sentence in refused(capsys, "finetune", *start, *(word.format(lab=lab) for word in words))
    assert not (tmp_path / "run").exists()


def test_help_offers_each_verb_its_methods(capsys):
    for verb, table in (("finetune", ONLINE), ("offline", OFFLINE)):
        assert main([verb, "--help"]) == 0
        line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("  method="))
        # Settings of rlpd, residual_td3 and tdmpc that have a name of their own.
        presets = {f"{name}_{size}" for name in ("residual_td3", "tdmpc") for size in ("cpu", "published")}
        named = {"sac", "td3", *presets} if verb == "finetune" else set()
        assert line.strip().removeprefix("method=").split("|") == sorted(table.keys() | named)
