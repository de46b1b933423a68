"""The training loop of an SB3 algorithm, with the interface of our own loops. Its state is saved without pickle.

A slice is one call of ``learn`` that plays one rollout and learns from it, which is what SB3's own loop consists of:
slices end at the same weights, bit for bit, as one long ``learn``. A run resumes as SB3 does: parameters, optimisers,
counters and the replay go on; episodes begin anew, random numbers too, so a resumed run is as good as the first and not
the same bit for bit. SB3 draws from the global generators; they stand for its own only while it works.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.logger import KVWriter, Logger
from torch import Tensor

from ...policies.core.chunk import DecisionEnv
from ...policies.core.errors import BurnishError
from ...policies.core.files import replacing
from ...policies.core.seed import derive
from ...policies.core.types import Learns, Metrics, Outcome, Step, VecEnv
from ...policies.core.wrapper import Wrapper
from ...policies.gaussian import GaussianPolicy
from ..episode_statistics import EpisodeStatistics
from .actor import copy_actor


class Noted(Wrapper):
    """Notes every control tick in the episode statistics, below whatever view SB3 trains on."""

    def __init__(self, env: VecEnv, statistics: EpisodeStatistics) -> None:
        super().__init__(env)
        self.statistics = statistics

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        playing = torch.ones_like(step.terminated) if active is None else active
        reward = torch.where(playing, step.reward, 0.0)
        ended = playing & (step.terminated | step.truncated)
        info = {key: playing & x.bool() for key, x in step.info.items() if key == "success"}
        steps = playing.long()
        if "bonus" in step.info:
            info["bonus"] = torch.where(playing, step.info["bonus"], 0.0)
        # Of an outcome the statistics read no more than rewards, ends, steps, success and what exploration paid.
        self.statistics.note(Outcome(step.obs, step.obs, reward, reward, ended, ended, steps, action[:, None], info))
        return step


class Randomness:
    """The generators of torch (CPU, and that of a CUDA ``device``) and NumPy that SB3 draws from, apart from all other
    draws of the process."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed, self.device = seed, torch.device(device)
        self.shared = [torch.default_generator]
        if self.device.type == "cuda":
            torch.cuda.init()  # before which there are none
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self.shared.append(torch.cuda.default_generators[index])
        self.torch = [torch.Generator(x.device).manual_seed(seed).get_state() for x in self.shared]
        self.numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        outside, numpy = self._swapped(self.torch), np.random.get_state()
        np.random.set_state(self.numpy)
        try:
            yield
        finally:
            self.torch, self.numpy = self._swapped(outside), np.random.get_state()
            np.random.set_state(numpy)

    def _swapped(self, states: list[Tensor]) -> list[Tensor]:
        """Give the generators of torch these states, and return those that they had."""
        had = [x.get_state() for x in self.shared]
        for source, state in zip(self.shared, states, strict=True):
            source.set_state(state)
        return had


class Numbers(KVWriter):
    """The numbers that SB3 logs, instead of a table on the screen."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        # Its clocks measure a slice, which says nothing.
        numbers = {k: v for k, v in key_values.items() if isinstance(v, (int, float, np.number))}
        self.latest |= {key: float(x) for key, x in numbers.items() if not key.startswith("time/")}

    def close(self) -> None:
        pass


class Training(Learns):
    """An iteration is one rollout of SB3 and what it learns from it. It is its own learner."""

    replay, pretraining = None, 0  # SB3 has its own memory

    def __init__(
        self,
        model: Any,
        view: DecisionEnv,
        agent: GaussianPolicy,
        policy: Any,
        statistics: EpisodeStatistics,
        randomness: Randomness,
        about: str,
        keep_zip: bool = False,
    ) -> None:
        self.model, self.env, self.agent, self.statistics, self.randomness = model, view, agent, statistics, randomness
        self._policy, self._about, self._keep_zip = policy, about, keep_zip
        self.numbers = Numbers()
        model.set_logger(Logger(None, [self.numbers]))
        self.on_policy = not hasattr(model, "replay_buffer")

    @property
    def learner(self) -> Training:
        return self

    @property
    def policy(self) -> Any:
        """The deployable policy, with the present weights of SB3's actor."""
        copy_actor(self.model, self.agent)
        return self._policy

    def describe(self) -> str:
        return f"Stable-Baselines3 {stable_baselines3.__version__}: {self._about}"

    @property
    def decisions_per_iteration(self) -> int:
        length = self.model.n_steps if self.on_policy else self.model.train_freq.frequency
        return length * self.env.num_envs

    def iterations(self, total: int) -> int:
        starts = 0 if self.on_policy else self.model.learning_starts
        if total <= starts:
            raise BurnishError(
                f"total={total} decisions end within the {starts} of SB3's learning_starts, so nothing is learnt; "
                "raise total or lower method.settings.learning_starts"
            )
        return -(-total // self.decisions_per_iteration)

    def iterate(self) -> Metrics:
        self.learn(self.decisions_per_iteration)
        return {}

    def learn(self, total: int, callbacks: Sequence[Any] = ()) -> None:
        """``total`` more decisions in one call of SB3's ``learn``."""
        with self.randomness.at_work():
            self.model.learn(total, list(callbacks), log_interval=None, reset_num_timesteps=False)
        self.statistics.decisions = self.model.num_timesteps

    def report(self) -> Metrics:
        """Ours, and under its own names whatever SB3 has logged since the last report."""
        self.numbers.latest = {}
        self.model.dump_logs()
        return {**self.statistics.report(), **self.numbers.latest}

    def deliver(self, folder: Path) -> str:
        if not self._keep_zip:
            return ""
        target = folder / "sb3.zip"
        with replacing(target) as file:
            self.model.save(file)
        return f"{target} is for SB3 alone; it is pickle, which can run code when loaded, and Burnish never reads it"

    def state_dict(self) -> dict[str, Any]:
        model = self.model
        return {
            "parameters": copy.deepcopy(dict(model.get_parameters())),
            "variables": {name: getattr(model, name).detach().clone() for name in model._get_torch_save_params()[1]},
            "counters": {name: int(getattr(model, name)) for name in COUNTERS},
            "replay": None if self.on_policy else _replay_state(model.replay_buffer),
            "ledger": self.statistics.state_dict(),
            "env": self.env.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model = self.model
        model.set_parameters(copy.deepcopy(state["parameters"]), device=model.device)
        for name, value in state["variables"].items():
            getattr(model, name).data.copy_(value)
        for name in COUNTERS:
            setattr(model, name, state["counters"][name])
        if not self.on_policy:
            _load_replay(model.replay_buffer, state["replay"])
        self.statistics.load_state_dict(state["ledger"])
        self.statistics.abandon()
        self.env.load_state_dict(state["env"])
        model._last_obs = None  # a reset begins the next slice
        self.randomness = Randomness(derive(self.randomness.seed, "resumed", model.num_timesteps), model.device)
        model.action_space.seed(derive(self.randomness.seed, "warm-up") % 2**32)


COUNTERS = ("num_timesteps", "_n_updates", "_episode_num")
COLUMNS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def _by_key(observed: Any) -> dict[str, Any]:
    """An array of SB3, or a dict of arrays, as a dict."""
    return observed if isinstance(observed, dict) else {"": observed}


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array))


def _replay_state(replay: Any) -> dict[str, Any]:
    """The filled part alone: SB3 reserves a million rows."""
    filled = replay.buffer_size if replay.full else replay.pos
    columns = {
        name: {key: _tensor(x[:filled]) for key, x in _by_key(getattr(replay, name)).items()} for name in COLUMNS
    }
    return {"columns": columns, "pos": int(replay.pos), "full": bool(replay.full)}


def _load_replay(replay: Any, state: dict[str, Any]) -> None:
    replay.pos, replay.full = state["pos"], state["full"]
    for name, column in state["columns"].items():
        for key, saved in column.items():
            _by_key(getattr(replay, name))[key][: len(saved)] = saved.numpy()
    newest = (replay.pos - 1) % replay.buffer_size
    open_ended = replay.dones[newest] == 0
    # The episodes in progress are not continued: no return of several steps may reach into the next row.
    replay.dones[newest, open_ended] = replay.timeouts[newest, open_ended] = 1
