"""A recurrent learner as another package would write it: one file, announced as `acme_recurrent`.

A GRU reads what the world shows and forgets where an episode begins. Its critic learns the reward of the next tick, its
actor climbs that. Decisions are stored with the memory that they were made with, and learnt from in sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from burnish.finetune.build import prepare
from burnish.finetune.loops import Assembly, OffPolicy, OffPolicyConfig
from burnish.finetune.method import LoopKind, Method, Needs
from burnish.offline.returns import Discount
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.ranges import check_ranges
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, agent_spec
from burnish.policies.core.types import Decision, Learner, Step
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs.module_state import restore, state_of


@dataclass
class RecurrentConfig:
    hidden: int = 16  # size of the memory
    length: int = 6  # decisions of a sequence
    lr: float = 1e-2  # learning rate of everything
    explore_std: float = 0.5  # of the noise that is played
    discount: Discount = field(default_factory=lambda: Discount(0.0))  # only the next tick counts
    loop: OffPolicyConfig = field(default_factory=OffPolicyConfig)  # how much is played, stored and learnt

    def __post_init__(self):
        check_ranges(self, {"[1, inf)": "hidden", "[2, inf)": "length", "(0, inf)": "lr", "[0, inf)": "explore_std"})


def flat(obs):
    return torch.cat([x.float().flatten(-1) for _, x in sorted(obs.items())], -1)


class Memory(nn.Module):
    def __init__(self, size, dim, hidden):
        super().__init__()
        self.cell = nn.GRUCell(size, hidden)
        self.mean, self.value = (
            nn.Linear(hidden, dim),
            nn.Sequential(nn.Linear(hidden + dim, 64), nn.ReLU(), nn.Linear(64, 1)),
        )

    def forward(self, obs, memory, fresh):
        return self.cell(flat(obs), memory * ~fresh[:, None])


class Player:
    def __init__(self, net, explore_std):
        self.net, self.explore_std, self.memory, self.age = net, explore_std, None, None

    @torch.no_grad()
    def act(self, obs, *, warm, generator, fresh=None):
        assert fresh is not None, "the loops always say it"
        if self.memory is None:
            self.memory, self.age = torch.zeros(len(fresh), self.net.cell.hidden_size), torch.zeros(len(fresh))
        before = self.memory
        self.memory, self.age = self.net(obs, before, fresh), torch.where(fresh, 1, self.age + 1)
        mean = self.net.mean(self.memory).tanh()
        noise = torch.randn(mean.shape, generator=generator)
        action = (mean + self.explore_std * noise).clamp(-1, 1)
        return Decision(action[:, None], {"memory": before, "fresh": fresh})

    def state_dict(self):
        return self.net.state_dict()


class Recurrent(Learner):
    def __init__(self, config, spec):
        size = sum(torch.Size(shape).numel() for shape in spec.inputs.shapes.values())
        self.config, self.net = config, Memory(size, spec.action.dim, config.hidden)
        self.actor = self.player = Player(self.net, config.explore_std)
        self.policy = build_policy(GaussianConfig(hidden=[16]), spec)
        self.optimizer = torch.optim.Adam([*self.net.parameters(), *self.policy.parameters()], config.lr)
        self.parts = {"net": self.net, "policy": self.policy, "optimizer": self.optimizer}

    def update(self, source):
        batch = source.sample(sequence=self.config.length)
        memory, critic, climb = batch["memory"][:, 0], [], []
        for t in range(self.config.length):
            memory = self.net({key: x[:, t] for key, x in batch["obs"].items()}, memory, batch["fresh"][:, t])
            error = self.net.value(torch.cat([memory, batch["action"][:, t, 0]], -1))[:, 0] - batch["reward"][:, t]
            chosen = torch.cat([memory.detach(), self.net.mean(memory.detach()).tanh()], -1)
            critic.append(error.square())
            climb.append(-torch.func.functional_call(self.net.value, self.fixed(), (chosen,))[:, 0])
        valid = batch["valid"].float()
        loss = ((torch.stack(critic, 1) + torch.stack(climb, 1)) * valid).sum() / valid.sum()
        # A memory cannot be delivered as a policy of ours: what is delivered imitates it by what is seen.
        copied = self.policy.bc_loss({key: x[:, 0] for key, x in batch["obs"].items()}, batch["action"][:, 0]).mean()
        self.optimizer.zero_grad()
        (loss + copied).backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "memory/oldest": float(self.player.age.max())}

    def fixed(self):
        return {name: x.detach() for name, x in self.net.value.named_parameters()}

    def state_dict(self):
        return {**state_of(self.parts), "memory": self.player.memory, "age": self.player.age}

    def load_state_dict(self, state):
        restore(self.parts, state)
        self.player.memory, self.player.age = state["memory"], state["age"]


def build(config, base, env, *, seed=0, device="cpu"):
    spec = agent_spec(env.spec)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Assembly(ChunkEnv(env, 1, config.discount.per_step(1)), Recurrent(config, spec))


METHOD = Method(doc="a GRU that remembers", config=RecurrentConfig, build=build, needs=Needs.gaussian)
NUMBER = 3
ON_POLICY = METHOD.changed(loop=LoopKind.on_policy)


class Recall:
    """A cue of -1 or 1 is shown at the first tick, and to be answered at the three others."""

    def __init__(self, num_envs, seed):
        self.num_envs, self.device, self.source = num_envs, torch.device("cpu"), torch.Generator().manual_seed(seed)
        self.spec = EnvSpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "test", 4)
        self.cue, self.tick = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)

    def seen(self):
        return {"state": torch.stack([self.cue * (self.tick == 0), (self.tick == 0).float()], 1)}

    def reset(self, mask=None, seeds=None):
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask
        cue = 2.0 * torch.randint(2, (self.num_envs,), generator=self.source) - 1
        self.cue, self.tick = torch.where(mask, cue, self.cue), torch.where(mask, 0, self.tick)
        return self.seen()

    def step(self, action, active=None):
        reward = -(action[:, 0] - self.cue).square() * (self.tick > 0)
        self.tick = self.tick + 1
        ends = self.tick == 4
        return Step(self.seen(), reward, ends, torch.zeros_like(ends), {})


def recall_error(row, *, remembers, seed=0):
    """The mean squared error of the answers after 3,200 decisions; ``remembers`` False: each is told to be a first."""
    config = row.config(loop=OffPolicyConfig(warmup=64, updates_per_decision=0.25, batch=64))
    loop = prepare(config, None, Recall(16, seed), seed=seed)
    assert isinstance(loop, OffPolicy)
    real = loop.learner.actor.act
    if not remembers:
        loop.learner.actor.act = lambda obs, fresh, **options: real(obs, fresh=torch.ones_like(fresh), **options)
    for _ in range(200):
        loop.iterate()
    loop.learner.actor.explore_std = 0.0
    rewards = [loop.played(warm=False)[3].reward for _ in range(40)]
    return -float(torch.stack(rewards).mean()) * 4 / 3
