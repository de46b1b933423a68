"""explore=information: what a tick says about physical parameters, in closed form and in MuJoCo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from verb_lab import refused

from burnish.finetune.exploration.information import Information, InformationConfig
from burnish.policies.cli.cli import main
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env, world_from

SPREAD, NOISE = 0.5, 0.1
ONE = torch.ones(1, dtype=torch.bool)
State = Callable[[Mapping[str, float], Tensor, Tensor], Tensor]


def information_of(state: State, parameters: list[str], nuisance: list[str] | None = None) -> Information:
    """Of one world whose state (1, 2) is moved by ``state(factors, state, action)``, seen in units of 1."""

    def dynamics(factors: Mapping[str, float]) -> Any:
        every = {**dict.fromkeys(("mass", "friction", "gain", "offset"), 1.0), **factors}
        return lambda obs, action: {"state": state(every, obs["state"], action)}

    config = InformationConfig(parameters=parameters, nuisance=nuisance or [], spread=SPREAD, noise=NOISE)
    world = EnvSpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0,) * 2, (1.0,) * 2), 10.0, "none", 40)
    made = Information(config, world, 1, torch.device("cpu"), 0, SimpleNamespace(parametric_dynamics=dynamics))
    made.observed.absorb = lambda raw: None  # type: ignore[method-assign]  # so that a deviation stays 1
    made.begin({"state": torch.zeros(1, 2)}, ONE)
    return made


def paid(made: Information, state: list[float], action: list[float]) -> float:
    obs = {"state": torch.tensor([state])}
    return float(made(obs, torch.tensor([action]), obs, ONE))


def sledge(factors: Mapping[str, float], state: Tensor, action: Tensor) -> Tensor:
    """A force on a mass that friction slows; the offset is in nothing that is seen."""
    speed = state[:, 1] + (action[:, 0] - factors["friction"] * state[:, 1]) / factors["mass"]
    return torch.stack([state[:, 0], speed], 1)


def test_an_episode_earns_the_log_determinant_of_what_it_says():
    """d speed / d log mass = -(u - v), d speed / d log friction = -v."""
    made, total = information_of(sledge, ["mass", "friction"]), 0.0
    precision = torch.eye(2, dtype=torch.float64) / SPREAD**2
    for u, v in ((1.0, 0.0), (0.5, 1.0), (-1.0, 0.3)):
        total += paid(made, [0.0, v], [u, 0.0])
        moved = torch.tensor([-(u - v), -v], dtype=torch.float64) / NOISE
        precision += moved[:, None] * moved
    prior = torch.eye(2, dtype=torch.float64) / SPREAD**2
    assert total == pytest.approx(float(torch.logdet(precision) - torch.logdet(prior)) / 2, rel=1e-3)
    made.begin({"state": torch.zeros(1, 2)}, ONE)
    assert torch.equal(made.precision[0], prior), "another episode is another experiment"


def test_a_parameter_that_is_in_nothing_seen_earns_nothing():
    assert paid(information_of(sledge, ["offset"]), [0.0, 1.0], [1.0, 0.0]) == pytest.approx(0, abs=1e-9)
    known, doubtful = (information_of(sledge, ["mass"], x) for x in ([], ["offset"]))
    assert paid(known, [0.0, 0.0], [1.0, 0.0]) == pytest.approx(paid(doubtful, [0.0, 0.0], [1.0, 0.0]))


def test_an_effect_that_a_nuisance_could_have_had_says_at_most_half_a_bit():
    """Seen is gain / mass alone. With an equal prior of both the Schur complement rises to twice the prior at most."""

    def motor(factors: Mapping[str, float], state: Tensor, action: Tensor) -> Tensor:
        return state + factors["gain"] * action / factors["mass"]

    def total(made: Information) -> float:
        return sum(paid(made, [0.0, 0.0], [1.0, 1.0]) for _ in range(200))

    assert total(information_of(motor, ["mass"], ["gain"])) == pytest.approx(math.log(2) / 2, rel=1e-3)
    assert total(information_of(motor, ["mass"])) > 3


def test_the_best_actions_tell_all_parameters_and_those_of_the_largest_trace_tell_one():
    """The mass moves what is seen 10 times as much as the friction, and an action is divided between the two."""

    def divided(factors: Mapping[str, float], state: Tensor, action: Tensor) -> Tensor:
        return torch.stack([10 * factors["mass"] * action[:, 0], factors["friction"] * action[:, 1]], 1)

    angles = torch.linspace(0, math.pi / 2, 9)
    actions = torch.stack([angles.cos(), angles.sin()], 1)
    still = {"state": torch.zeros(1, 2)}

    def variances(choose: Callable[[Information, int], int], steps: int = 40) -> Tensor:
        made = information_of(divided, ["mass", "friction"])
        for step in range(steps):
            made(still, actions[choose(made, step)][None], still, ONE)
        return made.precision[0].inverse().diagonal()

    def best(made: Information, step: int) -> int:
        kept, found = made.precision.clone(), []
        for action in actions:
            found.append(paid(made, [0.0, 0.0], action.tolist()))
            made.precision = kept.clone()
        return int(torch.tensor(found).argmax())

    def lured(made: Information, step: int) -> int:
        return int(torch.stack([made.sensitivity(still, x[None]).square().sum() for x in actions]).argmax())

    dice = torch.Generator().manual_seed(0)
    designed, traced = variances(best), variances(lured)
    random = variances(lambda made, step: int(torch.randint(9, (1,), generator=dice)))
    assert traced[1] == pytest.approx(SPREAD**2), "it never learns of the friction"
    assert designed[1] < 0.001 and designed[0] < 0.001
    assert designed.prod() < random.prod()


def test_a_hopper_in_the_air_tells_of_its_mass_and_not_of_its_friction():
    twin: Any = make_env(world_from({"name": "hopper", "config": {}}), 2)
    config = InformationConfig(parameters=["mass"], nuisance=["friction"])
    made = Information(config, twin.spec, 2, torch.device("cpu"), 0, twin)
    before = twin.known_dynamics
    flying = {"state": torch.zeros(2, 11)}
    flying["state"][:, 0] = 3.0
    action = torch.full((2, 3), 0.5)
    plain = before(flying, action)["state"]
    moved = made.sensitivity(flying, action)
    assert float(moved[..., 0].abs().max()) > 1 and float(moved[..., 1].abs().max()) == 0
    landed = {"state": flying["state"].clone()}
    landed["state"][:, 0] = 1.2
    landed["state"][:, 5] = 3.0  # it slides
    assert float(made.sensitivity(landed, action)[..., 1].abs().max()) > 1
    assert torch.equal(before(flying, action)["state"], plain), "the twin is left with other parameters"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gaussian_ppo", "rlpd"])
def test_the_command_explores_with_a_twin(method, tmp_path, capsys):
    words = [
        "finetune",
        f"method={method}",
        "env=hopper",
        "worlds=2",
        f"out={tmp_path}/run",
        "total=48",
        "log_every=16",
    ]
    words += ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2", "explore=information"]
    small = ["critic.hidden=[8]", "critic.members=2", "agent.hidden=[8]"]
    if method == "rlpd":
        words += ["method.loop.warmup=8", "method.loop.batch=8", *(f"method.sac.{word}" for word in small)]
    else:
        words += ["method.loop.decisions_per_update=8", "method.ppo.epochs=1"]
    assert "explore=information asks a simulation of the world" in refused(capsys, *words)
    assert main([*words, "twin=lqr"]) == 2 and main([*words, "twin=hopper", "explore.parameters=[weight]"]) == 2
    assert "no parameter 'weight' of this world" in capsys.readouterr().err
    assert main([*words, "twin=hopper"]) == 0
    assert max(float(line.get("bonus", 0)) for line in read_metrics(tmp_path / "run")) > 0
