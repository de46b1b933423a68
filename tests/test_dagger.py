"""DAgger: what somebody did while holding the robot is imitated, and nothing else, unless everything is relabelled."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.people.dagger import DAgger, DAggerConfig, build, corrected, corrected_around
from burnish.finetune.people.interventions import InterventionConfig, Rule
from burnish.offline.dataset import decisions
from burnish.offline.imitation import imitation_chunk
from burnish.offline.replay import Replay
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy, load_policy
from burnish.policies.cli.cli import compose, main, to_object
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec
from burnish.policies.core.types import Controller, Obs
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.gaussian import GaussianConfig, GaussianLoss
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import make_expert
from burnish.sim.experts.toy import point_reach_law
from refine_lab import LINE, ON_LINE, mean_return, run, same, weights
from source_lab import heard

WORLDS = 4
OPEN = replace(LINE, terminate=False)  # else the students that reach the goal would be seen less than the others
NEVER = InterventionConfig(rule=Rule.random, probability=0.0)


class Whim:
    """An expert who does anything: labels that are independent noise."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)

    def reset(self, mask: Tensor, seeds: Any = None) -> None: ...

    def step(self, obs: Obs) -> Tensor:
        return 2 * torch.rand(WORLDS, 1, generator=self.source) - 1

    def peek(self, obs: Obs) -> Tensor:
        raise AssertionError("nobody looks ahead")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def student(spec: PolicySpec = ON_LINE) -> Any:
    """Stands still."""
    usual: dict[str, Any] = {"hidden": [32, 32], "zero_last": True, "loss": GaussianLoss.least_squares}
    return build_policy(GaussianConfig(**usual), spec)


def flow(spec: PolicySpec = ON_LINE) -> Any:
    return build_policy(FlowConfig(steps=2, net=DenoiserConfig(mlp=MlpBodyConfig([16]))), spec, seed=3)


def tiny(loop: dict[str, Any] | None = None, **settings: Any) -> DAggerConfig:
    usual: dict[str, Any] = {"capacity": 20_000, "warmup": 0, "updates_per_decision": 0.5, "batch": 64}
    settings = {"lr": 3e-3, "tau": 0.05} | settings
    return DAggerConfig(**settings, loop=OffPolicyConfig(**(usual | {"prior_share": 1.0} | (loop or {}))))


def started(
    config: DAggerConfig, base: Any, seed: int = 0, expert: Controller | None = None, **options: Any
) -> OffPolicy[Any]:
    helper = make_expert(OPEN, WORLDS, "clean", seed=seed) if expert is None else expert
    env = ScaledEnv(make_env(OPEN, WORLDS, seed=seed))
    loop = prepare(config, base, env, expert=helper, seed=seed, **options)
    assert isinstance(loop, OffPolicy) and isinstance(loop.learner, DAgger)
    return loop


def batch_of(intervened: list[list[bool]], steps: list[int]) -> dict[str, Any]:
    count = len(steps)
    executed = 0.1 + 0.1 * torch.arange(2.0 * count).view(count, 2, 1)
    real = torch.arange(2) < torch.tensor(steps)[:, None]
    return {
        "obs": {"state": torch.randn(count, 2, generator=torch.Generator().manual_seed(0))},
        "executed": torch.where(real[..., None], executed, 0.0),
        "intervened": torch.tensor(intervened),
        "steps": torch.tensor(steps),
        "label": torch.full((count, 1), -0.9),
    }


def test_what_there_is_to_imitate() -> None:
    """The policy, the policy and then the expert, the expert, the expert until an end."""
    batch = batch_of([[False, False], [False, True], [True, True], [True, False]], [2, 2, 2, 1])
    batch["label"][2:] = batch["executed"][2:, 0]  # the expert did what it would have done
    for relabel, counts in ((False, [0, 0, 2, 1]), (True, [1, 1, 2, 1])):
        action, steps = corrected(batch, relabel)
        assert steps.tolist() == counts
        assert torch.equal(action[:, 0], batch["label"]) and torch.equal(action[:, 1], batch["executed"][:, 1])
    assert batch["executed"][0, 0] == pytest.approx(0.1)  # the batch stays what it is


@pytest.mark.parametrize("make", [student, flow])
def test_the_policy_does_not_imitate_itself(make: Any) -> None:
    """Decisions of its own change nothing, however they are labelled; the same decisions of an expert do."""
    env = ScaledEnv(make_env(OPEN, WORLDS))
    for intervened, moves in (([[False, False], [False, True]], False), ([[True, True], [True, True]], True)):
        learner = build(tiny(), make(), env).learner
        before = weights(learner.student)
        learner.update(Rows(batch_of(intervened, [2, 2])))
        assert torch.equal(weights(learner.student), before) != moves


@pytest.mark.parametrize(
    ("intervened", "learns"),
    [
        ([[True, True], [True, True]], [False, True, True, False]),
        ([[False, False], [False, True]], [False, True, False, False]),  # of these, what was said to the first action
    ],
)
def test_without_neighbours_a_longer_chunk_learns_its_slice_alone(intervened: Any, learns: list[bool]) -> None:
    """The horizon is 4, what is executed stands at 1 and 2: the other positions get no gradient."""
    spec = replace(ON_LINE, horizon=4, start=1)
    learner = build(tiny(relabel=True), student(spec), ScaledEnv(make_env(OPEN, WORLDS)), expert=Whim(0)).learner
    learner.update(Rows(batch_of(intervened, [2, 2])))
    (bias,) = [p for p in learner.student.trunk.parameters() if p.shape == (4,)]  # of the last layer, which began at 0
    assert (bias != 0).tolist() == learns


def test_the_run_of_an_expert_through_its_decisions_is_one_chunk() -> None:
    """Decisions of 2 ticks and 6 positions; what the expert plays without giving back is imitated, the rest is not."""
    spec = replace(ON_LINE, horizon=6, execute=2, start=0)
    intervened = torch.tensor([[[1, 1], [1, 1], [1, 0]], [[1, 0], [1, 1], [1, 1]], [[0, 1], [1, 1], [1, 1]]]).bool()
    action, count = torch.rand(3, 3, 2, 1), torch.full((3, 3), 2)
    batch = {"executed": action[:, 0], "intervened": intervened[:, 0], "steps": count[:, 0], "label": action[:, 0, 0]}
    near = {"executed": action, "action": action, "intervened": intervened, "steps": count}
    batch["around"] = {**near, "valid": torch.ones(3, 3, dtype=torch.bool)}
    for relabel, known in ((False, [5, 1, 0]), (True, [5, 1, 1])):
        chunk, mask = imitation_chunk(spec, *corrected(batch, relabel), corrected_around(batch))
        assert mask.sum(1).tolist() == known
        assert torch.equal(chunk[0, :5], action[0].flatten(0, 1)[:5])


@pytest.mark.parametrize("horizon", [2, 6])
def test_recordings_teach_dagger_whole_chunks(horizon: int) -> None:
    """Through the loop and its lessons, in episodes of 8 ticks; without neighbours positions 2 to 5 are never told."""
    spec = replace(ON_LINE, horizon=horizon)
    loop, masks = started(tiny(), flow(spec), prior=recorded()), []
    imitate = loop.learner.student.bc_loss

    def bc_loss(obs: Obs, chunk: Tensor, *, mask: Tensor, generator: Any) -> Tensor:
        masks.append(mask)
        return imitate(obs, chunk, mask=mask, generator=generator)

    loop.learner.student.bc_loss = bc_loss
    run(loop, 80)
    share = torch.cat(masks).float().mean(0)
    assert share.shape == (horizon,) and float(share.min()) > 0.1


def recorded() -> Replay:
    env = make_env(OPEN, 3)
    episodes = collect(env, make_expert(OPEN, 3, "clean"), evaluation_seeds(3, stream="recorded"))
    return decisions(episodes, ON_LINE, 0.99)


def test_every_batch_is_of_the_union() -> None:
    loop = started(tiny(), student(), prior=recorded())
    loop.source, batches = heard(loop.source)
    run(loop, 200)
    for batch in batches:
        assert batch["intervened"][:, 0].all()  # somebody else than the policy played it
    # Recordings are 8 ticks in 2 phases: 7 or 8 decisions an episode. What was played in the world is in the replay.
    helped = int(loop.replay.latest()["intervened"][..., 0].sum())
    assert len(loop.prior) == helped + len(recorded()) and helped > 0  # pyright: ignore


def test_recordings_alone_teach_before_anything_is_played() -> None:
    """60 updates are two iterations, one of 50 and one of 10; then it plays."""
    loop = started(tiny(), student(), prior=recorded(), pretrain_updates=60)
    loop.source, batches = heard(loop.source)
    metrics = [loop.iterate() for _ in range(2)]
    assert len(batches) == 60 and len(loop.replay) == 0
    assert all(batch["intervened"][:, 0].all() for batch in batches)
    assert metrics[-1]["intervened"] == 0  # of no ticks
    run(loop, 8)
    assert len(loop.replay) == 8


@pytest.mark.parametrize(("norm", "clips"), [("null", False), ("1e-3", True)])
def test_gradients_are_clipped_only_where_a_norm_is_given(norm: str, clips: bool) -> None:
    """By the words of the command line. The rounding of a norm is far below one percent of it."""
    words = ["method=dagger", f"method.max_grad_norm={norm}"]
    config = to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], words)).method
    learner, batch = DAgger(student(), config), batch_of([[True, True]] * 4, [2] * 4)
    learner._descent(batch["obs"], *corrected(batch, False), {})
    gradient = torch.cat([p.grad.flatten() for p in learner.student.parameters() if p.grad is not None])
    assert (float(gradient.norm()) <= 1.01e-3) == clips


def test_relabelling_asks_the_expert_about_what_the_policy_sees() -> None:
    """Nobody ever takes over; what is imitated is the law of the expert on the observations that are stored."""
    spec = replace(ON_LINE, horizon=1, execute=1)
    loop = started(tiny(relabel=True, intervention=NEVER), student(spec))
    loop.source, batches = heard(loop.source)
    run(loop, 200)
    law = point_reach_law(OPEN)
    for batch in batches:
        assert not batch["intervened"].any()
        action, steps = corrected(batch, True)
        assert torch.equal(action[:, 0], law(batch["obs"])) and (steps == 1).all()
    assert len(loop.prior) == len(loop.replay) == 200  # pyright: ignore


# Mean returns of 20 recorded seeds: -1.51 to -1.15; of noise as labels -4.75 to -4.20; the student that stands still,
# -4.49. With noise for an expert, who agrees with nobody, 0.60 to 0.63 of the ticks stay under intervention.
LEARNT = -2.0


def test_it_learns_what_it_is_shown() -> None:
    for seed in range(3):
        loop = started(tiny(), student(), seed)
        run(loop, 400)
        assert mean_return(loop.learner.policy) > LEARNT
    control = started(tiny(), student(), expert=Whim(0))
    assert float(run(control, 400)["intervened"]) > 0.55
    assert mean_return(control.learner.policy) < -3.5


def test_it_needs_fewer_and_fewer_interventions() -> None:
    """Of the ticks of late, over 20 seeds: 0.52 to 0.63 after 100 decisions, and 0.01 to 0.39 after 800."""
    loop = started(tiny(), student())
    early = float(run(loop, 100)["intervened"])
    late = float(run(loop, 700)["intervened"])
    assert early > 0.5 > late


@pytest.mark.parametrize("make", [student, flow])
def test_a_resumed_run_equals_the_uninterrupted_one(make: Any, tmp_path: Path) -> None:
    def start() -> OffPolicy[Any]:
        interveners = InterventionConfig(late=1, hold=3, miss=0.2)
        return started(tiny({"capacity": 120}, intervention=interveners), make(), prior=recorded())

    whole, first, second = start(), start(), start()
    run(whole, 240)
    run(first, 160)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    run(first, 12)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(second, 80)
    assert same(second.state_dict(), whole.state_dict())


def test_the_base_is_a_guest_and_the_average_is_what_acts() -> None:
    base = student()
    before = weights(base)
    loop = started(tiny(), base)
    run(loop, 100)
    learner = loop.learner
    assert torch.equal(weights(base), before)
    assert learner.actor.policy is learner.policy
    assert not torch.equal(weights(learner.policy), weights(learner.student))
    assert not any(p.requires_grad for p in learner.policy.parameters())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lr": 0.0}, "lr=0.0 must be a positive number"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm=inf"),
        ({"tau": 0.0}, r"tau=0.0 must lie in \(0, 1\]"),
        ({"loop": {"n_step": 3}}, "loop.n_step=3"),
        ({"loop": {"prior_share": 0.5}}, "loop.prior_share=0.5"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BurnishError, match=sentence):
        tiny(**settings)


def test_what_it_cannot_do_is_said() -> None:
    env = ScaledEnv(make_env(OPEN, WORLDS))
    with pytest.raises(BurnishError, match="relabel=true asks an expert about every decision, but there is none"):
        prepare(tiny(relabel=True), student(), env)
    with pytest.raises(BurnishError, match="method=dagger needs a policy that can go on imitating"):
        prepare(tiny(), CallablePolicy(lambda obs: torch.zeros(len(obs["state"]), 2, 1), ON_LINE), env)


# ---- the command line ----

EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
SMALL = ["worlds=2", "total=24", "log_every=4", "save_every=8", "method.loop.batch=8", *EVALUATION]


@pytest.mark.slow
def test_a_run_from_the_command_line_resumes_and_what_it_saves_is_of_the_kind_of_its_base(
    tmp_path: Path, capsys: Any
) -> None:
    data, base = tmp_path / "data", tmp_path / "flow"
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=4", f"out={data}"]) == 0
    net = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    assert main(["pretrain", *net, f"data={data}", f"out={base}", *EVALUATION]) == 0
    words = ["finetune", "method=dagger", "policy=checkpoint", f"policy.path={base}", f"data={data}", "expert=noisy"]
    words += SMALL
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    *_, last = sorted((tmp_path / "whole/checkpoints").iterdir())
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints" / last.name)
    assert main([*words, f"out={tmp_path}/killed", "resume=true"]) == 0
    states = [sorted((tmp_path / run / "checkpoints" / last.name).rglob("state.*")) for run in ("whole", "killed")]
    assert len(states[0]) >= 4 and [p.read_bytes() for p in states[0]] == [p.read_bytes() for p in states[1]]
    assert any("intervened" in line for line in read_metrics(tmp_path / "whole"))
    policy, origin = load_policy(tmp_path / "whole")
    assert isinstance(policy, FlowPolicy) and origin["method"] == "dagger"
    assert main(["evaluate", f"policy.path={tmp_path}/whole", f"against={base}", *EVALUATION]) == 0
    capsys.readouterr()
    assert main([*words[: -len(SMALL) - 1], *SMALL, f"out={tmp_path}/run"]) == 2
    assert "method=dagger learns from interventions; say who intervenes" in capsys.readouterr().err
