"""Acting by recordings: each sees one number of rows and answers what the policy does. A CPU pretends to have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verb_lab import refused

from burnish.offline.actors import PolicyActor
from burnish.policies.build import describe
from burnish.policies.controllers import controller_for
from burnish.policies.core import graphed_policy as module
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.graphed_policy import Graphed, GraphedActor, executed, executed_actor
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import RowNoise, generator
from burnish.policies.core.spec import agent_spec
from burnish.policies.measure.evaluate import evaluate
from burnish.policies.runs.checkpoint import save
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from seam import make_base

KINDS = ("gaussian", "flow", "diffusion")
WORLD = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=0.4, max_steps=12)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def policy_of(kind: str, device: str = "cpu") -> Any:
    return make_base(kind, agent_spec(PointReach(1, WORLD).spec, 3)).to(device)


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """The rows that recordings saw, each of which takes one number of them, as on a GPU."""
    seen: list[int] = []

    def execution(fn: Any, mode: Execution, *, device: Any, generators: Any = ()) -> Any:
        assert mode is Execution.cudagraph
        mine: set[int] = set()

        def replay(given: dict[str, Any]) -> Any:
            rows = {len(x) for x in tensors(given)}
            mine.update(rows)
            seen.extend(rows)
            assert len(mine) == 1, "a recording of one shape was given another"
            return fn(given)

        return replay

    monkeypatch.setattr(module, "execution", execution)
    return seen


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for part in tree.values() for x in tensors(part)] if isinstance(tree, dict) else [tree]


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_that_end_at_different_times_are_played_as_before(kind, sizes):
    policy, world = policy_of(kind), ScaledEnv(PointReach(6, WORLD))

    def played(acting: Any, greedy: bool, seed: int = 0) -> torch.Tensor:
        found = evaluate(world, controller_for(acting, 6, greedy=greedy), range(seed, seed + 9))
        return torch.tensor([*found.returns, *found.lengths])

    for greedy in (False, True):
        assert torch.allclose(played(Graphed(policy, "cpu"), greedy), played(policy, greedy), atol=1e-4)
    assert {8} <= set(sizes) <= {1, 2, 4, 8}
    assert not torch.equal(played(policy, False), played(policy, False, seed=9)), "the comparison can fail"


def test_noise_is_passed_on_and_what_cannot_be_recorded_is_not(sizes):
    policy = policy_of("flow")
    acting, obs = Graphed(policy, "cpu"), {"state": torch.randn(3, *policy.spec.obs.shapes["state"])}
    noise = torch.randn(3, *policy.spec.noise_shape)
    for rows, size in ((3, 4), (1, 1), (2, 2)):
        few = {key: x[:rows] for key, x in obs.items()}
        assert torch.allclose(acting.act(few, noise=noise[:rows]), policy.act(few, noise=noise[:rows]), atol=1e-6)
        assert sizes[-1] == size
    before = len(sizes)
    dice = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    assert torch.equal(acting.act(obs, generator=dice[0]), policy.act(obs, generator=dice[1]))
    assert len(sizes) == before, "line by line"


def test_an_actor_is_recorded_for_each_source_of_noise_and_number_of_worlds(sizes):
    """And its prior is not: that of the warm-up may ask anybody."""
    actor = PolicyActor(policy_of("gaussian"))
    recorded = executed_actor(actor, Execution.cudagraph, "cpu")
    assert executed_actor(actor, Execution.eager, "cpu") is executed_actor(actor, Execution.compile, "cpu") is actor
    obs = {"state": torch.randn(3, *actor.policy.spec.obs.shapes["state"])}
    one, two = (generator(0, "act"), generator(0, "other")), (generator(0, "act"), generator(0, "other"))
    for rows, which in ((3, 0), (2, 0), (3, 1), (3, 0)):
        few = {key: x[:rows] for key, x in obs.items()}
        mine, theirs = (x.act(few, warm=False, generator=y[which]) for x, y in ((recorded, one), (actor, two)))
        assert torch.equal(mine.action, theirs.action) and sizes[-1] == rows
    assert len(sizes) == 4 and len(recorded._made) == 3
    warm = [x.act(obs, warm=True, generator=generator(0, "act")).action for x in (recorded, actor)]
    assert torch.equal(*warm) and len(sizes) == 4, "line by line"
    recorded.forget()
    recorded.act(obs, warm=False, generator=one[0])
    assert isinstance(recorded, GraphedActor) and len(recorded._made) == 1


def test_streams_of_noise_go_through_tensors():
    one = RowNoise([3, 4], [0, 7])
    again = RowNoise.of(one.stream)
    assert torch.equal(one.normal((2, 5)), again.normal((2, 5))) and torch.equal(one.stream, again.stream)


def test_what_is_of_no_use_is_refused(capsys, tmp_path):
    policy = policy_of("flow")
    assert executed(policy, Execution.eager, "cpu") is policy
    with pytest.raises(BurnishError, match="execution=compile on device=cuda is of no use for acting"):
        executed(policy, Execution.compile, "cuda")
    with pytest.raises(BurnishError, match="answers with whole chunks, and this policy is a CallablePolicy"):
        executed(make_base("callable", policy.spec), Execution.cudagraph, "cuda")
    save(tmp_path / "base", config=describe(policy), state=policy.state_dict())
    for verb in ("evaluate", "serve"):
        words = [verb, f"policy.path={tmp_path}/base", "execution=cudagraph", *(["env=point_reach"] * (verb[0] == "e"))]
        assert "execution=cudagraph on device=cpu is of no use for acting" in refused(capsys, *words)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_equals_eager_bit_for_bit(kind):
    policy = policy_of(kind, "cuda")
    acting = executed(policy, Execution.cudagraph, "cuda")
    last = None
    for i in range(6):  # the first are played, the fourth is recorded, the others replay it
        obs = {"state": torch.randn(4, *policy.spec.obs.shapes["state"], device="cuda")}
        index = torch.arange(4, device="cuda") + i
        with torch.no_grad():
            found, wanted = (x.act(obs, generator=RowNoise(index, index)) for x in (acting, policy))
            assert torch.equal(found, wanted)
            assert torch.equal(acting.act(obs, greedy=True), policy.act(obs, greedy=True))
            few = {"state": obs["state"][:3]}
            found, wanted = (x.act(few, generator=RowNoise(index[:3], index[:3])) for x in (acting, policy))
            assert torch.allclose(found, wanted, atol=1e-5)
        assert last is None or not torch.equal(wanted, last)
        last = wanted
