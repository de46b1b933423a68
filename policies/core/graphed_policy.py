"""A policy whose acting is recorded as CUDA graphs, as an update is (`execute.py`), and an actor of the loops.

A recording has one number of rows, and episodes end at different times. So rows are filled up to a power of two with
copies of the first, and the answers are those of eager acting on as many rows, bit for bit. The noise of a world is
computed of its counters on the device, so it is recorded with the rest.

``compile`` is refused: on one core it made 61 of 73 µs (a Gaussian, one row), 153 of 164 and 498 of 544 (one step of a
flow, 1 and 50 rows), after half a minute or more of compiling for each number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import BurnishError
from .execute import Execution, execution
from .seed import Noise, RowNoise
from .tree import map_tree
from .types import Actor, Decision, Obs, Prefix


class Graphed:
    """``policy``, which acts by recordings; with a prefix or a generator of torch it acts line by line."""

    def __init__(self, policy: nn.Module, device: torch.device | str) -> None:
        self.policy: Any = policy
        self.device, self.spec = device, policy.spec
        self._made: dict[Any, Callable[..., Tensor]] = {}  # by what is given, and the number of rows

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        if prefix is not None or not (generator is None or isinstance(generator, RowNoise)):
            return self.policy.act(obs, noise=noise, prefix=prefix, greedy=greedy, generator=generator)
        rows = len(next(iter(obs.values())))
        size = 1 << (rows - 1).bit_length()
        given: dict[str, Any] = {"obs": dict(obs)}
        given |= {} if noise is None else {"noise": noise}
        given |= {} if generator is None else {"stream": generator.stream}
        filled = map_tree(lambda x: torch.cat([x, x[:1].expand(size - rows, *x.shape[1:])]), given)
        how = greedy, size, *given
        if how not in self._made:
            act = partial(self._act, greedy)
            self._made[how] = execution(act, Execution.cudagraph, device=self.device)
        return self._made[how](filled)[:rows]

    def _act(self, greedy: bool, given: dict[str, Any]) -> Tensor:
        generator = RowNoise.of(given["stream"]) if "stream" in given else None
        return self.policy.act(given["obs"], noise=given.get("noise"), greedy=greedy, generator=generator)


def executed(policy: Any, mode: Execution, device: torch.device | str) -> Any:
    """``policy`` itself where it acts line by line; what cannot be recorded, or is of no use, is refused."""
    if mode is Execution.eager:
        return policy
    if mode is Execution.compile or torch.device(device).type != "cuda":
        raise BurnishError(
            f"execution={mode.value} on device={device} is of no use for acting; leave it out, or take "
            "execution=cudagraph with device=cuda"
        )
    require_network(policy)
    return Graphed(policy, device)


def require_network(policy: Any) -> None:
    """A refusal of a policy whose answers no recording can hold."""
    if not isinstance(policy, nn.Module) or hasattr(policy, "controller"):
        raise BurnishError(
            f"execution=cudagraph is for a network that answers with whole chunks, and this policy is a "
            f"{type(policy).__name__}; leave execution= out"
        )


class GraphedActor:
    """``actor`` has no memory of its own. Its decisions for a number of worlds are a recording, with the noise of the
    loop; the prior of its warm-up acts line by line."""

    def __init__(self, actor: Actor, device: torch.device | str) -> None:
        self.actor, self.device = actor, device
        self._made: dict[Any, Callable[[Obs], Decision]] = {}  # by source of noise, worlds, and what they show

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        if warm:
            return self.actor.act(obs, warm=True, generator=generator, fresh=fresh)
        how = generator, len(next(iter(obs.values()))), *sorted(obs)
        if how not in self._made:
            act = partial(self._act, generator)
            self._made[how] = execution(act, Execution.cudagraph, device=self.device, generators=[generator])
        return self._made[how](dict(obs))

    def _act(self, generator: torch.Generator, obs: Obs) -> Decision:
        return self.actor.act(obs, warm=False, generator=generator)

    def forget(self) -> None:
        """Recordings of networks whose weights move to other memory."""
        self._made.clear()

    def state_dict(self) -> dict[str, Any]:
        return self.actor.state_dict()


def executed_actor(actor: Any, mode: Execution, device: torch.device | str) -> Any:
    """``actor`` as its learner's updates are executed; compiled, acting gains nothing (above)."""
    return GraphedActor(actor, device) if mode is Execution.cudagraph else actor
