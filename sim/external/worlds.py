"""Any Gymnasium environment (Towers et al. 2024, arXiv 2407.17032) as worlds of ours: N worlds in W worker processes.

The environments live in `world_server.py`, the ways to them are in `links.py`, and `workers.py` keeps them. A worker
steps several worlds for one request, and observations come back through shared memory, so that neither pickles nor
pipes stand between. The same seeds play the same episodes in any number of workers, because each world is reset with a
seed of its own.

An environment that is a function of its seed and its actions, as Gymnasium asks, can also be saved: its state is the
seed of the episode and the actions so far, which are played again. The observation tells whether that was true; where
it was not, the episodes to come are those of the state, and the ones under way are given up with a warning.

Seeds have 31 bits here, since many generators take no more: a longer one is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.core import tree
from ...policies.core.clock import Clock, restored
from ...policies.core.errors import BurnishError, WorldError, plain
from ...policies.core.spec import require_bytes
from ...policies.core.types import Obs, Step
from ...policies.data.observation import Layout
from .links import Failed
from .settings import GymConfig, RemoteConfig, Reward
from .spec import spec_of
from .workers import Workers
from .world_server import SUCCESS, UNREPORTED

_log = logging.getLogger(__name__)

LARGEST_PLAYED = 1 << 30  # bytes of the actions of all episodes under way, which are kept to save their state
SEED_BITS = 31
UNSAVED = "it is not deterministic, so they were not saved"
ELSEWHERE = "the same seed and actions lead elsewhere; it is not deterministic, or another version was installed"


def cut_seed(seed: int) -> int:
    """The lowest 31 bits of a seed, as many as every environment takes."""
    return seed & ((1 << SEED_BITS) - 1)


class ExternalEnv:
    """Rows of worlds that are not active keep their last observation, and are paid nothing."""

    def __init__(
        self,
        num_envs: int,
        config: GymConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config = config or GymConfig()
        self.num_envs, self.device = num_envs, torch.device(device)
        self._clock = Clock(num_envs, seed)
        self._begun, self._succeeded, self._ended, self._reported = np.zeros((4, num_envs), dtype=bool)
        self._paid = np.zeros(num_envs)  # by the last step of each, which the step in which an episode is lost repeats
        self.reported = False  # whether any step has said if it is a success
        self._advice: Tensor | None = None
        self.workers = Workers(config, num_envs)
        self.description = found = self.workers.description
        if isinstance(config, RemoteConfig) and config.address is not None:
            theirs = found.get("id", config.id)
            if config.id not in (theirs, RemoteConfig.id):
                raise BurnishError(
                    f"the server of env.address={config.address} has the world {plain(theirs, 200)}, not "
                    f"env.id={config.id}; leave env.id out"
                )
            self.config = config = replace(config, id=theirs)
        self.continues = not found["nondeterministic"]  # whether its state holds the episodes under way
        self._layout = Layout(found["observation"], config.id)
        self.spec, self.hz_from = spec_of(found, self._layout.spec, config)
        self.state_names, self.goal_names = self._layout.names("state"), self._layout.names("goal")
        action, self._dtype = self.spec.action, np.dtype(found["action"]["dtype"])
        self._low, self._high = np.array(action.low, self._dtype), np.array(action.high, self._dtype)
        self._rows = self._layout.room(num_envs)
        require_bytes(
            4 * num_envs * self.spec.max_steps * action.dim, LARGEST_PLAYED,
            f"the actions of {num_envs} episodes of env.max_steps={self.spec.max_steps}",
        )  # fmt: skip
        self._played = np.zeros((num_envs, self.spec.max_steps, action.dim), np.float32)

    def describe(self) -> str:
        """For the first line of a run."""
        rate = f"{self.spec.control_hz:g} Hz ({self.hz_from})"
        return (
            f"{self.config.label}: {self.num_envs} worlds in {self.place()}, {rate}, at most {self.spec.max_steps} "
            f"steps, success by {self.success_from()}"
        ) + "".join(f"; {note}" for note in self.description["says"]["notes"] or ())

    def place(self) -> str:
        return self.workers.where()

    def success_from(self) -> str:
        named = {name: getattr(self.config, name) for name in ("success", "success_reward")}
        return next(
            (f"env.{name}={x}" for name, x in named.items() if x is not None), f"{' or '.join(SUCCESS)} in its info"
        )

    def info_keys(self) -> str:
        """What its infos said last, as the end of a sentence; empty where they said nothing."""
        keys = self.workers.info_keys()
        return f"; its info has {', '.join(keys)}" if keys else ""

    @property
    def drawn(self) -> bool:
        """It was made with pictures, of which films are."""
        return self.description["render_mode"] == "rgb_array"

    def sources(self) -> dict[str, list[str]]:
        """Of each key that is observed, the keys of the environment, with dots; one without a name is all it has."""
        return self._layout.sources()

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        chosen = mask.numpy()
        self._begun |= chosen
        self._played[chosen] = 0
        self._succeeded[chosen] = self._ended[chosen] = self.workers.lost[chosen] = self._reported[chosen] = False
        self._paid[chosen] = 0
        self.workers.give("seeds", cut_seeds(self._clock.seeds))
        self._request(b"r", chosen)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} {self.spec.action.dim}")
        given = action.detach().cpu().float().numpy()
        units, ticks = self._to_units(given), self._clock.tick.numpy()
        chosen = self._clock.advance(active).numpy()
        self._refuse_idle(chosen, ticks)
        self._played[chosen, ticks[chosen]] = given[chosen]
        self.workers.give("action", units)
        self._request(b"s", chosen & ~self.workers.lost)
        names = ("reward", "success", "terminated", "truncated")
        reward, success, terminated, truncated = map(self.workers.get, names)
        lost = self.workers.lost
        if self.config.success_reward is not None:
            success = (reward >= self.config.success_reward).astype(np.uint8)
        live, reported = chosen & ~lost, success != UNREPORTED
        reward = self._paid = np.where(live, reward, self._paid)
        won = live & reported & (success > 0)
        terminated = live & (terminated.astype(bool) | (won & self.config.end_at_success))
        late = ticks + 1 >= self.spec.max_steps
        truncated = chosen & ~terminated & (truncated.astype(bool) | late | lost)
        self._ended |= terminated | truncated
        self._succeeded |= won
        if self.config.reward is Reward.until_success:
            self._reported |= live & reported
            self._require_success(live & (terminated | truncated) & ~self._reported)
            reward = -(~self._succeeded).astype(np.float64)
        facts = {"executed": units.astype(np.float32), **({"lost": chosen & lost} if self.config.restart else {})}
        if (live & reported).any():
            facts["success"], self.reported = won, True
        return Step(
            self._observe(),
            torch.from_numpy(np.where(chosen, reward, 0)).float().to(self.device),
            torch.from_numpy(terminated).to(self.device),
            torch.from_numpy(truncated).to(self.device),
            {key: torch.from_numpy(x).to(self.device) for key, x in facts.items()},
        )

    def advice(self) -> Tensor:
        """(N, A) in actuator units: what the experts (`Workers.take_on`) would do now. Each is asked once a tick, and
        no more once its episode has ended."""
        if self._advice is None:
            self.workers.request(b"x", self._begun & ~self._ended & ~self.workers.lost, self._begun)
            found = self.workers.get("advice")
            if (bad := ~np.isfinite(found).all(axis=1)).any():
                raise WorldError(
                    f"the expert beside {self.config.label} failed: its action {found[bad][0]} is not finite"
                )
            self._advice = torch.from_numpy(found)
        return self._advice

    def render(self, size: int = 128) -> Tensor:
        """(N, H, W, 3) uint8. How large, the environment decides: many take ``width`` and ``height`` as arguments."""
        if not self.drawn:
            raise BurnishError(
                f"{self.config.label} was made without pictures; say 'env.kwargs={{render_mode: rgb_array}}' (of "
                f"ManiSkill env.film=true) beside env=gym env.id={self.config.id}, at the latest in `burnish collect`, "
                "so that what comes of it remembers that"
            )
        try:
            frames = [
                np.frombuffer(data, np.uint8).reshape(header["shape"])
                for header, data in self.workers.of_each_world(b"v", lambda i: ({}, b""))
            ]
        except Failed as error:
            raise BurnishError(f"{self.config.label} cannot be rendered: {error}") from error
        return torch.from_numpy(np.stack(frames)).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        if not self.continues:
            return self._clock.state_dict()
        longest = int(self._clock.tick.max())
        return {
            **self._clock.state_dict(),
            "begun": torch.from_numpy(self._begun.copy()),
            "succeeded": torch.from_numpy(self._succeeded.copy()),
            "ended": torch.from_numpy(self._ended.copy()),
            "played": torch.from_numpy(self._played[:, :longest].copy()),
            **{f"obs.{key}": torch.from_numpy(x.copy()) for key, x in self._rows.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The episodes under way are played again, and must lead to the observations that were saved; else every world
        has to be reset next, and ``continues`` is False."""
        self._clock.load_state_dict(state)
        self.workers.lost[:], self._ended[:], self._advice = False, False, None
        self._reported[:] = True  # or not: of the episodes under way it is not stored
        why = self._replayed(state) if self.continues and "begun" in state else UNSAVED
        if why is not None:
            self.continues = False
            self._begun[:] = False
            _log.warning("the episodes of %s cannot be continued, and begin anew: %s", self.config.id, plain(why))

    def _replayed(self, state: dict[str, Any]) -> str | None:
        """Why not, where the episodes of ``state`` could not be played again."""
        seen = restored(self._tensors(), state, "obs.")
        flags = {name: torch.zeros(self.num_envs, dtype=torch.bool) for name in ("begun", "succeeded", "ended")}
        flags = restored(flags, {**flags, **state})  # older ones lack the latter two
        self._begun, self._succeeded, self._ended = (x.numpy() for x in flags.values())
        longest = int(self._clock.tick.max())
        room = torch.from_numpy(self._played[:, :longest])
        given = state.get("played")
        if isinstance(given, Tensor) and given.ndim == room.ndim:
            given = given[:, :longest]  # saved with more worlds, of which one may have played longer
        played = restored({"played": room}, {"played": given})["played"].numpy()
        self._played[:] = 0
        self._played[:, :longest] = played

        def episode(i: int) -> tuple[dict[str, Any], bytes] | None:
            steps = int(self._clock.tick[i])
            actions = self._to_units(self._played[i, :steps]).astype(np.float64).tobytes()
            seed = int(cut_seed(int(self._clock.seeds[i])))
            return ({"seed": seed}, actions) if self._begun[i] else None

        try:
            self.workers.of_each_world(b"p", episode)
        except Failed as error:
            return str(error)
        self._gather()
        chosen = self._begun
        same = (np.array_equal(x[chosen], seen[k].numpy()[chosen], equal_nan=True) for k, x in self._rows.items())
        return None if all(same) else ELSEWHERE

    def close(self) -> None:
        self.workers.close()

    def _request(self, letter: bytes, chosen: np.ndarray) -> None:
        self.workers.request(letter, chosen, self._begun)
        self._advice = None
        self._gather()

    def _gather(self) -> None:
        """A world whose episode was lost shows what it showed before: what it shows now may be no number."""
        lost = self.workers.lost
        kept = {key: x[lost] for key, x in self._rows.items()} if lost.any() else {}
        for link, share in zip(self.workers.links, self.workers.shares, strict=True):
            self._layout.write(link.arrays, {key: x[share] for key, x in self._rows.items()})
        for key, x in kept.items():
            self._rows[key][lost] = x

    # ---- Checks ----

    def _refuse_idle(self, chosen: np.ndarray, ticks: np.ndarray) -> None:
        for bad, words in (
            (chosen & ~self._begun, "was never reset, so it cannot step"),
            (chosen & (ticks >= self.spec.max_steps), "was stepped after its end"),
        ):
            if bad.any():
                raise BurnishError(f"world {int(bad.argmax())} of {self.config.label} {words}; reset it first")

    def _require_success(self, unreported: np.ndarray) -> None:
        """At the end of an episode: some worlds report it in their last step alone."""
        if unreported.any():
            raise BurnishError(
                f"env.reward=until_success needs to know of success, and {self.config.label} reports none; say how to "
                "read it: env.success=KEY of its info, env.success=terminated, or env.success_reward=AMOUNT"
                f"{self.info_keys()}"
            )

    def _to_units(self, action: np.ndarray) -> np.ndarray:
        """(..., A), clipped, of the type that the environment takes."""
        return np.clip(action.astype(self._dtype), self._low, self._high)

    def _tensors(self) -> Obs:
        return {key: torch.from_numpy(x) for key, x in self._rows.items()}

    def _observe(self) -> Obs:
        return {key: x.clone().to(self.device) for key, x in self._tensors().items()}


def cut_seeds(seeds: Tensor) -> np.ndarray:
    """The lowest 31 bits of each seed, as an array on the CPU."""
    return seeds.cpu().numpy() & ((1 << SEED_BITS) - 1)
