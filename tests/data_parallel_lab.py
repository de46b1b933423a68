"""One of the processes of test_data_parallel.py: refines by each on-policy method in shared worlds, and leaves weights.

torchrun --nproc-per-node 2 data_parallel_lab.py FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sharding_lab import Unreduced
from test_vla_features import discs
from torch import Tensor

from burnish.finetune.data_parallel import SharedOnPolicy
from burnish.finetune.loops import OnPolicyConfig
from burnish.finetune.methods.dppo import DPPOConfig
from burnish.finetune.methods.flow_sde import FlowSDEConfig
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.methods.grpo import GRPOConfig
from burnish.finetune.methods.reinflow import ReinFlowConfig
from burnish.finetune.methods.residual_ppo import ResidualPPOConfig
from burnish.finetune.methods.rpd import RPDConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.policies.core.execute import Precision
from burnish.policies.core.ranks import ALONE, Ranks, joined
from burnish.policies.core.spec import agent_spec
from burnish.policies.evaluator import EvalConfig
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.state_codec import encode, separate
from burnish.policies.trainable import Part, TrainableConfig
from burnish.sim.build import make_env
from burnish.sim.discs import DiscsConfig
from burnish.sim.point_reach import PointReachConfig

UPDATES = 6
# trained once more without the sum of the gradients, as the control
APART = ("gaussian_ppo", "dppo", "reinflow", "dppo_shares", "vla_shares")
WORLD = PointReachConfig(max_steps=7, noise=0.2, goal_in_state=True, radius=0.4)
LOOP = OnPolicyConfig(decisions_per_update=7)
# 28 rows in four minibatches of 7: the two ranks have 4 and 3 of each.
PPO = PPOConfig(epochs=2, minibatch=8, scale_reward=True, value=ValueConfig(hidden=[16]))
UNSCALED = replace(PPO, scale_reward=False)
SHARES = replace(PPO, shard=True)  # of one process: the same
COMPARED = replace(FlowSDEConfig().ppo, epochs=2, minibatch=8, shard=True)
SMALL = GaussianConfig(hidden=[16])
METHODS: dict[str, Any] = {
    "gaussian_ppo": GaussianPPOConfig(SMALL, ppo=replace(PPO, target_kl=0.001), loop=LOOP),  # which stops some updates
    "residual_ppo": ResidualPPOConfig(agent=SMALL, ppo=PPO, loop=LOOP, l1=0.1),
    "dppo": DPPOConfig(trained_steps=2, ppo=PPO, loop=LOOP),
    "reinflow": ReinFlowConfig(ppo=PPO, loop=LOOP),
    "flow_sde": FlowSDEConfig(ppo=PPO, loop=LOOP),
    "dppo_shares": DPPOConfig(trained_steps=3, ppo=SHARES, loop=LOOP),
    "reinflow_shares": ReinFlowConfig(ppo=SHARES, loop=LOOP),
    "lora_shares": FlowSDEConfig(ppo=SHARES, loop=LOOP, train=TrainableConfig(Part.lora, rank=2)),
    "grpo_shares": GRPOConfig(FlowSDEConfig(ppo=COMPARED), group=2, loop=LOOP),
    # so long that worlds of the two ranks play different numbers of episodes, after which both go on with the same
    "grpo": GRPOConfig(GaussianPPOConfig(SMALL, ppo=UNSCALED), group=2, loop=OnPolicyConfig(21)),
    "vla_shares": ReinFlowConfig(ppo=SHARES, loop=LOOP),  # a frozen part in bfloat16, and one that is trained
    "rpd": RPDConfig(agent=SMALL, ppo=PPO, loop=LOOP),
}


def base(kind: str) -> Any:
    """A small flow, where the method has a base."""
    if kind in ("gaussian_ppo", "grpo"):
        return None
    if kind == "vla_shares":
        return discs(frozen_dtype=Precision.bfloat16)
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[16], time_dim=4))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FlowPolicy(agent_spec(make_env(WORLD, 1).spec, 2), FlowConfig(steps=3, net=net))


def world_of(kind: str) -> Any:
    return DiscsConfig(max_steps=7) if kind == "vla_shares" else WORLD


def loop_of(kind: str, seed: int = 0) -> Any:
    """The loop of a method in four worlds, or in the share of them that this rank has."""
    config = FinetuneConfig(
        method=METHODS[kind], env=world_of(kind), worlds=4, total=10**6, seed=seed, eval=EvalConfig(episodes=0)
    )
    return refinement(config, base(kind), tried=False)[1]


def state(kind: str, ranks: Ranks = ALONE, seed: int = 0, apart: bool = False) -> dict[str, Tensor]:
    """All numbers of a training after ``UPDATES`` updates, by name, as a checkpoint would hold them. Several ranks load
    their own state halfway; one process does not. ``apart``: they do not add up gradients of shares."""
    with ranks.own_worlds():
        loop, after = loop_of(kind, seed), loop_of(kind, seed)
    for part in (*ppo_of(loop).network.modules(), *ppo_of(after).network.modules()) if apart else ():
        if hasattr(part, "set_custom_reduce_scatter"):
            part.set_custom_reduce_scatter(Unreduced())
    assert isinstance(loop, SharedOnPolicy) is (ranks.size > 1)
    for _ in range(UPDATES // 2):
        loop.iterate()
    if ranks.size > 1:
        after.load_state_dict(saved(loop, kind))
        loop = after
    for _ in range(UPDATES // 2):
        loop.iterate()
    return {f"{kind}/{name}": x for name, x in separate(encode(saved(loop, kind))[1]).items()}


def ppo_of(loop: Any) -> Any:
    return getattr(loop.learner, "ppo", loop.learner)


def bytes_held(kind: str, ranks: Ranks = ALONE) -> Tensor:
    """Of the policy that is trained, its gradients and moments."""
    with ranks.own_worlds():
        loop = loop_of(kind)
    loop.iterate()
    ppo = ppo_of(loop)
    parameters = [*ppo.network.parameters()]
    moments = [x for p in ppo.actor_parameters for x in ppo.optimizer.state[p].values() if x.ndim]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *moments]
    return torch.tensor(sum(getattr(x, "_local_tensor", x).nbytes for x in tensors))


def saved(loop: Any, kind: str) -> dict[str, Any]:
    """The state as this rank has it. Of an actor in shares the first rank alone has one, and a policy that is whole."""
    state = [{**loop.state_dict(), "deployed": loop.learner.policy.state_dict()}]
    if kind.endswith("_shares") and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(state)
    return state[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu") as (ranks, _):
        found = {name: x for kind in METHODS for name, x in state(kind, ranks).items()}
        found["held"] = bytes_held("vla_shares", ranks)
        Ranks.add_up = lambda self, tensors: None
        found |= {f"apart/{name}": x for kind in APART for name, x in state(kind, ranks, apart=True).items()}
        save_file(found, str(Path(sys.argv[1]) / f"{ranks.rank}.safetensors"))
