"""On-policy methods on several ranks: the numbers of one process, in what is learnt, played and saved."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel_lab import APART, METHODS, SHARES, WORLD, base, bytes_held, loop_of, state
from safetensors.torch import load_file
from test_ranks import ROUNDING, TORCHRUN

from burnish.finetune.actors.noisy_flow import NoiseConfig, NoisyFlowActor
from burnish.finetune.data_parallel import interleaved
from burnish.finetune.exploration.novelty import NoveltyConfig
from burnish.finetune.methods.dsrl import DSRLConfig
from burnish.finetune.methods.rpd import Distance
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.finetune.sharded_actor import ShardedActor
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.ranks import ALONE, Ranks
from burnish.policies.core.seed import EpisodeSeeds
from burnish.policies.trainable import Remember, TrainableConfig
from burnish.sim.discs import DiscsConfig
from burnish.sim.external.settings import GymConfig
from burnish.sim.external.worlds import ExternalEnv

# ---- processes ----


@pytest.mark.slow
def test_two_ranks_end_in_the_state_of_one_process(tmp_path):
    """Weights, moments of the optimiser, normalisers, scales of rewards, statistics, episodes under way and generators,
    of every method and after a checkpoint of two ranks. Largest observed: 4e-6, in a sum of squares."""
    lab = [*TORCHRUN, str(Path(__file__).with_name("data_parallel_lab.py")), str(tmp_path)]
    subprocess.run(lab, check=True, capture_output=True, timeout=240)
    both = [load_file(str(tmp_path / f"{rank}.safetensors")) for rank in (0, 1)]
    alone = {name: x for kind in METHODS for name, x in state(kind).items()}
    assert both[0].keys() == both[1].keys()
    here, there = (int(x.pop("held")) for x in both)
    whole = int(bytes_held("vla_shares"))
    # The first dimension of a tensor is divided, so the first rank may have a row more than the other.
    assert here >= there and whole <= here + there <= 1.05 * whole and here <= 0.56 * whole, (here, there, whole)
    apart = {name.removeprefix("apart/") for name in both[0] if name.startswith("apart/")}
    assert {name for name in both[0] if not name.startswith("apart/")} == alone.keys()
    for name, x in alone.items():
        assert torch.equal(both[0][name], both[1][name]), f"{name}: ranks never part"
        torch.testing.assert_close(both[0][name], x, rtol=ROUNDING, atol=ROUNDING, msg=name)
    for kind in APART:
        names = [name for name in apart if name.startswith(f"{kind}/learner.actor.")]
        far = [max(float((x[f"apart/{n}"].double() - alone[n].double()).abs().max()) for n in names) for x in both]
        assert min(far) > 10 * ROUNDING, "the control"


# ---- the parts ----


def test_a_rank_has_every_second_world_with_its_seeds():
    whole = EpisodeSeeds(0, 6, group=3)
    parts = []
    for rank in (0, 1):
        with Ranks(rank, 2).own_worlds():
            parts.append(EpisodeSeeds(0, 3, group=3))
    for _ in range(2):
        drawn = [each.begin(torch.ones(3, dtype=torch.bool)) for each in parts]
        assert torch.equal(torch.stack(drawn, 1).flatten(), whole.begin(torch.ones(6, dtype=torch.bool)))
    assert torch.equal(EpisodeSeeds(0, 3, group=3).current, torch.zeros(3, dtype=torch.int64))
    assert not torch.equal(EpisodeSeeds(0, 3).begin(torch.ones(3, dtype=torch.bool)), drawn[1]), "outside: alone again"


@pytest.mark.parametrize(("minibatch", "slices"), [(2, 4096), (9, 4096), (9, 2)])
def test_the_gradients_of_the_ranks_add_up_to_those_of_one_process(minibatch, slices, monkeypatch):
    """Of three ranks: one has no row of a minibatch of two, and of 28 rows in minibatches of 7 they have 3, 2 and 2. In
    slices of 2 the first one passes twice, and the others have nothing for the second pass."""
    sums: list[list[torch.Tensor]] = []
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensors: sums.append([x.clone() for x in tensors]))
    first = []
    for ranks in (ALONE, *(Ranks(rank, 3) for rank in range(3))):
        loop: Any = loop_of("gaussian_ppo")
        loop.learner.ranks, loop.learner.config = ranks, replace(loop.learner.config, minibatch=minibatch)
        loop.learner.slice = slices
        sums.clear()
        loop.iterate()
        first.append(sums[0])
    alone, *parts = first
    for wanted, *each in zip(alone, *parts, strict=True):
        torch.testing.assert_close(sum(each), wanted)
    last = parts[-1]
    assert all(not x.any() for x in last) is (minibatch == 2)


def test_states_of_ranks_become_one_and_what_one_lacks_is_zero():
    one = {"seen": torch.arange(2), "plan": None, "played": torch.ones(2, 1, 3), "same": torch.ones(5), "told": [{}]}
    two = {
        "seen": torch.arange(2) + 10,
        "plan": {"mask": torch.tensor([True, False])},
        "played": torch.full((2, 2, 3), 2.0),
        "same": torch.ones(5),
        "told": [{"success": torch.tensor([True, True])}],
    }
    found = interleaved([one, two], 2)
    assert found["seen"].tolist() == [0, 10, 1, 11]
    assert found["plan"]["mask"].tolist() == [False, True, False, False]
    assert found["played"][:, :, 0].tolist() == [[1, 0], [2, 2], [1, 0], [2, 2]]
    assert found["same"].tolist() == [1] * 5
    assert found["told"][0]["success"].tolist() == [False, True, False, True]
    columns = interleaved(
        [{"reward": torch.tensor([[1.0], [2.0]])}, {"reward": torch.tensor([[3.0], [4.0]])}], 1, dim=1
    )
    assert columns["reward"].tolist() == [[1, 3], [2, 4]]


def test_a_gymnasium_world_goes_on_from_its_share_of_a_state_in_which_another_played_longer():
    both, alone = (ExternalEnv(count, GymConfig("Pendulum-v1", processes=0)) for count in (2, 1))
    both.reset()
    for tick in range(4):
        both.step(torch.ones(2, 1), torch.tensor([tick < 2, True]))
    alone.load_state_dict({key: x[:1] for key, x in both.state_dict().items()})
    action = torch.full((2, 1), 0.5)
    here, there = alone.step(action[:1]), both.step(action)
    assert alone.continues and torch.equal(here.obs["state"], there.obs["state"][:1])


def test_the_whole_policy_has_parameters_of_its_own_on_the_numbers_of_the_base(monkeypatch):
    """Those of the actor move to another device when it is divided, and a base would come along."""
    monkeypatch.setattr("burnish.finetune.sharded_actor.divide", lambda *given: None)
    policy = base("vla_shares")
    actor = NoisyFlowActor(policy, NoiseConfig())
    kept = ShardedActor(actor, actor.flow, torch.device("cpu")).policy
    assert not {id(p) for p in kept.parameters()} & {id(p) for x in (actor, policy) for p in x.parameters()}
    places = {p.data_ptr() for p in policy.parameters()}
    named, fixed = (
        dict(kept.named_parameters()),
        {name for name, p in actor.flow.named_parameters() if not p.requires_grad},
    )
    assert fixed and all((named[name].data_ptr() in places) is (name in fixed) for name in named)


# ---- refusals ----

REFUSED = {
    "a replay": ({"method": DSRLConfig()}, "dsrl learns from a replay, which several ranks do not share"),
    "exploration": ({"explore": NoveltyConfig()}, "explore=... learns from the worlds of one process alone"),
    "an odd world": ({"worlds": 3}, "worlds=3 does not divide among 2 ranks"),
    "fresh chains": ({"method": replace(METHODS["dppo"], bc_coef=0.1)}, "method.bc_coef=0.1 draws chains"),
    "many answers": ({"method": replace(METHODS["rpd"], distance=Distance.kl)}, "method.distance=kl asks the teacher"),
    "shares of a correction": (
        {"method": replace(METHODS["residual_ppo"], ppo=SHARES)},
        "ppo.shard=true divides a policy that is trained itself, such as a flow, and a Residual is none",
    ),
    "shares of a half": ({"method": replace(METHODS["dppo"], ppo=SHARES)}, "take method.trained_steps=3"),
    "shares of what looks": (
        {
            "method": replace(METHODS["vla_shares"], train=TrainableConfig(remember=Remember.keys)),
            "env": DiscsConfig(),
        },
        "ppo.shard=true divides the network that train.remember=... looks with",
    ),
    "shares of an anchor": (
        {"method": replace(METHODS["reinflow_shares"], anchor=0.1)},
        "method.anchor=0.1 asks the whole base in every update",
    ),
    "a recording": (
        {"method": replace(METHODS["dppo"], ppo=replace(METHODS["dppo"].ppo, execution=Execution.cudagraph))},
        "ppo.execution=cudagraph records the update of one process",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(case):
    changes, words = REFUSED[case]
    config = replace(FinetuneConfig(method=METHODS["dppo"], env=WORLD, worlds=4), **changes)
    with pytest.raises(BurnishError, match=words), Ranks(0, 2).own_worlds():
        refinement(config, base("dppo" if config.env is WORLD else "vla_shares"), tried=False)


def test_another_verb_names_the_two_that_can_be_shared(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["offline", "method=iql", "data=nowhere"]) == 2
    assert "`burnish pretrain` and `burnish finetune` can be shared" in capsys.readouterr().err
