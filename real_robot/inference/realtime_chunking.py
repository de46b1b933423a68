"""Chunks in real time: a controller that asks for the next chunk while the arm plays the last one.

A chunk speaks of the ticks after its observation: its action ``start + i`` is meant for the i-th tick from there. When
an answer comes d ticks after its request, d actions were played meanwhile, so it takes over at ``start + d``: what it
says of the past is skipped, not played late. Three ways to go from chunk to chunk (`Mode`):

* ``queue``     the next chunk is asked for so early that it is there when the last one has played its part.
* ``ensemble``  a request whenever the last one is answered; what is played is the mean of all chunks that speak of
  the tick, weighted exp(-m i) with i = 0 the oldest (ACT, Zhao et al. 2023, arXiv 2304.13705).
* ``realtime``  as ``queue``, but the actions that will be played meanwhile are given along as a prefix, which the
  answer has to continue (real-time chunking, Black et al. 2025, arXiv 2506.07339), and ``overlap`` more of the old
  chunk if so wished. With ``hold=guide`` all that is left of the old chunk pulls as well, the later the weaker.

Actions that are displacements (``relative``) correct most of an error in their first ticks, which are those that are
skipped. So the chunk is followed as the path that it sums up to: what the skipped actions would have moved more than
what was played instead is owed, and added to the next actions as far as their limits allow.

d is expected, from latencies that were measured: the smallest number of ticks in which a share of the last answers
came. The first answers are left out, because they hold what happens once; so there is a rehearsal
(`RealtimeChunking.warm_up`) before the first motion, which also refuses what cannot work. A chunk takes over at the
expected tick even when it came earlier, so that the latency's jitter does not reach the arm.

**A late answer.** The old chunk is played on, up to its end; the answer takes over when it comes, at the action whose
turn it then is. Where there is nothing left to play, ``step`` waits: no action means "stay" in every action mode, but a
plan that is over is held by the control loop (`safe_robot`) whatever the mode. After ``patience_s`` it gives up
with a `RobotError`, and its caller brings the robot to rest. All of it is counted (`Report`).

With no latency, ``queue`` plays bit for bit what `policies.controllers.ChunkController` plays.

**Departures.** Real-time chunking as published guides a flow to the prefix and, by weights that decay, to all that is
left of the old chunk. ``hold=guide`` does so, and also puts the prefix into the chain (policies/chain.py says why). The
default puts it in and leaves the rest free: it needs no gradient, so that exported policies can do it as well, but a
short prefix holds less well; hence ``overlap``. "All that is left" ends where ``reach`` ends, beyond which a chunk may
be anything. The actions of a supervisor are not heard of here: the prefix holds what was asked for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.seed import EpisodeSeeds
from ...policies.core.types import Obs
from ..clock import SECOND, VirtualClock, ns
from ..control.link import Link
from ..env import RobotEnv
from ..errors import Refused, RobotError
from .chunk_settings import Chunks, Hold, Mode, Report, fading, quantile
from .worker import Chunk, InferenceRequest, InferenceResponse, InferenceWorker, Pulling

REHEARSAL_S = 120.0  # a first inference may compile
ROUNDING = 1e-6  # of a tick


class Line(NamedTuple):
    """A chunk in the time of the episode."""

    asked: int  # the tick of its observation
    actions: Chunk  # from that tick on

    @property
    def end(self) -> int:
        """The first tick of which it says nothing."""
        return self.asked + len(self.actions)

    def at(self, tick: int) -> Chunk:
        return self.actions[tick - self.asked]


class Asked(NamedTuple):
    """A question under way: the tick at which it was asked, and when its answer takes over."""

    tick: int
    delay: int  # ticks after which the answer takes over


class RealtimeChunking:
    """A `Controller` of one robot. ``warm_up`` comes before the first step."""

    def __init__(self, inference: InferenceWorker, chunks: Chunks, control_hz: float, *, seed: int = 0) -> None:
        facts = inference.facts
        if chunks.mode is Mode.realtime and not facts.continues:
            raise Refused("this policy takes no prefix, so chunks.mode=realtime has nothing to offer; take queue")
        if chunks.hold is Hold.guide and not facts.guides:
            raise Refused(
                "chunks.hold=guide follows a gradient through the policy, which bundles and servers do not give; take "
                "chunks.hold=inpaint, or the checkpoint"
            )
        most = facts.horizon - facts.start
        self._reach = chunks.reach or facts.execute
        if self._reach > most or (chunks.every or 1) > self._reach:
            raise Refused(
                f"chunks.every={chunks.every} must be at most chunks.reach={self._reach}, and that at most {most}, the "
                "actions of a chunk from its observation on"
            )
        self.chunks, self.report = chunks, Report()
        self._inference, self._facts, self._period_s = inference, facts, 1 / control_hz
        self._every = chunks.every or (1 if chunks.mode is Mode.ensemble else min(facts.execute, self._reach))
        self._window: deque[float] = deque(maxlen=chunks.window)
        self.delay: int | None = None  # ticks in which an answer is expected; None: nobody knows
        self._seeds = EpisodeSeeds(seed, 1)
        self._begin()

    def _begin(self) -> None:
        self._tick = self._decision = 0
        self._lines: list[Line] = []  # oldest first; but for an ensemble, at most one
        self._asked: Asked | None = None  # the request that is being answered
        self._ripening: tuple[Line, int] | None = None  # has come, and takes over at that tick
        self._due = 0  # the tick of the next request
        self._past: list[Chunk] = []  # what was played; the first ``start`` of it, what the policy was told of it
        self._playing: Line | None = None
        self._owed: Any = np.float32(0)  # displacement

    def warm_up(self, obs: Obs) -> dict[str, float]:
        """Ask about ``obs`` until it is known how long that takes. Before the first motion: nothing is played."""
        seen, took = _arrays(obs), []
        nothing = np.zeros((self._facts.start + self._reach, self._facts.dim), np.float32)
        asked = self._prefix(nothing, 0)  # being guided takes longer
        for decision in range(self.chunks.rehearsals):
            took.append(self._rehearse(InferenceRequest(seen, asked, 0, decision)).took_s)
        if self.chunks.mode is Mode.realtime:
            self._require_continuation(seen)
        kept = took[self.chunks.forget :]
        for seconds in kept:
            self._measured(seconds)
        assert self.delay is not None
        if 2 * self.delay > self._reach:
            most = self._facts.horizon - self._facts.start
            raise Refused(
                f"an answer takes {self.delay} ticks of {1e3 * self._period_s:g} ms, and the {self._reach} actions "
                "that are played of a chunk would be over before the next one is there; export the policy, run it on a "
                f"faster machine, or raise chunks.reach to {most} if it learnt whole chunks by imitation"
            )
        return {"p50": 1e3 * quantile(kept, 0.5), "p99": 1e3 * quantile(kept, 0.99), "delay": float(self.delay)}

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        if not bool(mask[0]):
            return
        self._seeds.begin(mask, seeds)
        if self._asked is not None or self._ripening is not None:
            self.report.discarded += 1
        self._inference.discard()
        self._begin()

    def step(self, obs: Obs) -> Tensor:
        if self.delay is None:
            raise Refused("the time of the policy's inference is not known; call warm_up(obs) before the first motion")
        self._receive()
        if self._asked is None and self._ripening is None and self._tick >= self._due:
            self._ask(obs)
            self._receive()
        if not self._lines:
            self._wait(obs)
        action = self._lines[-1].at(self._tick) if self.chunks.mode is not Mode.ensemble else self._mean()
        wanted = action + self._owed
        action = np.clip(wanted, -1, 1) if self.chunks.relative else action
        self._owed = wanted - action
        self._note_seam(action)
        self._past.append(action)
        self._tick += 1
        return torch.from_numpy(action.copy())[None]

    def peek(self, obs: Obs) -> Tensor:
        raise BurnishError("what is played next depends on when an answer comes, so it cannot be told beforehand")

    def state_dict(self) -> dict[str, Any]:
        raise BurnishError("a request that waits for its answer cannot be saved; let the episode end")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise BurnishError("a request that waits for its answer cannot be resumed; begin an episode")

    def close(self) -> None:
        self._inference.close()

    def _ask(self, obs: Obs) -> None:
        assert self.delay is not None
        tick, line = self._tick, self._lines[-1] if self._lines else None
        # No more can be played until the answer is there than there is.
        delay = min(self.delay, line.end - tick) if line is not None else 0
        prefix = self._left(line, delay) if self.chunks.mode is Mode.realtime and line is not None else None
        self._inference.ask(InferenceRequest(_arrays(obs), prefix, int(self._seeds.current[0]), self._decision))
        self._asked = Asked(tick, delay)
        self._decision += 1
        self.report.questions += 1

    def _left(self, line: Line, delay: int) -> Chunk | Pulling | None:
        """The actions that the answer has to continue: those played from its head on, and the rest of ``line``."""
        tick, played = self._tick, self._past[self._tick : self._tick + self._facts.start]
        left = np.stack([*played, *(line.at(i) for i in range(tick, line.end))])
        return self._prefix(left, min(len(played) + delay + self.chunks.overlap, len(left)))

    def _prefix(self, left: Chunk, committed: int) -> Chunk | Pulling | None:
        if self.chunks.hold is Hold.guide:
            return Pulling(left, fading(committed, len(left)))
        return left[:committed] if committed else None

    def _receive(self) -> None:
        answer = self._inference.poll() if self._asked is not None else None
        if answer is not None:
            self._take(answer)
        self._take_over()

    def _take(self, answer: InferenceResponse) -> None:
        """An answer to what was asked."""
        assert self._asked is not None and self.delay is not None
        asked, self._asked = self._asked, None
        if answer.chunk is None:  # while there is something to play, it is asked again at the next tick
            self.report.failed += 1
            return
        self._measured(answer.took_s)
        self.report.answers += 1
        self.report.late += self._tick > asked.tick + asked.delay
        patient = self.chunks.mode is not Mode.ensemble  # a mean has no seam to be placed
        start = self._facts.start
        if not self._past:
            self._past = list(answer.chunk[:start])
        line = Line(asked.tick, answer.chunk[start : start + self._reach])
        self._ripening = line, asked.tick + (asked.delay if patient else 0)
        # The next answer has to be there while this chunk still speaks.
        self._due = asked.tick + max(1, min(self._every, self._reach - self.delay))

    def _take_over(self) -> None:
        """Chunks that have said all are forgotten; the new one is taken when it is ripe, or when there is no other."""
        self._lines = [line for line in self._lines if self._tick < line.end]
        if self._ripening is None or (self._lines and self._tick < self._ripening[1]):
            return
        line, self._ripening = self._ripening[0], None
        if self.chunks.relative and self.chunks.mode is not Mode.ensemble:
            moved = self._past[self._facts.start + line.asked :]
            self._owed = line.actions[: len(moved)].sum(0) - np.sum(moved, 0) if moved else np.float32(0)
        self._lines = [*self._lines, line] if self.chunks.mode is Mode.ensemble else [line]

    def _wait(self, obs: Obs) -> None:
        """Nothing is left to play, and the arm is held by its loop."""
        clock, first = self._inference.clock, self._tick == 0
        if self._asked is None:
            self._ask(obs)
        began_ns = clock.now_ns()
        answer = self._inference.wait(began_ns + ns(self.chunks.patience_s))
        if answer is None:
            raise RobotError(
                f"nothing is left to play, and no answer came within chunks.patience_s={self.chunks.patience_s:g}; the "
                "robot has to stop, and the policy to become faster"
            )
        self._take(answer)
        if answer.chunk is None:
            raise RobotError(f"nothing is left to play, and the policy does not answer: {answer.why}")
        self._take_over()
        if not first:
            self.report.waited += 1
            self.report.held_s += (clock.now_ns() - began_ns) / SECOND

    def _mean(self) -> Chunk:
        said = np.stack([line.at(self._tick) for line in self._lines]).astype(np.float64)
        weights = np.exp(-self.chunks.decay * np.arange(len(said)))
        return (weights @ said / weights.sum()).astype(np.float32)

    def _measured(self, took_s: float) -> None:
        self._window.append(took_s)
        self.report.latencies_s.append(took_s)
        self.delay = math.ceil(quantile(self._window, self.chunks.share) / self._period_s - ROUNDING)

    def _note_seam(self, action: Chunk) -> None:
        if self._tick > 0 and self._lines[-1] is not self._playing:
            self.report.seams.append(float(np.abs(action - self._past[-1]).max()))
        self._playing = self._lines[-1]

    def _rehearse(self, request: InferenceRequest) -> InferenceResponse:
        self._inference.ask(request)
        answer = self._inference.wait(self._inference.clock.now_ns() + ns(REHEARSAL_S))
        if answer is None or answer.chunk is None:
            why = f"nothing came within {REHEARSAL_S:g} s" if answer is None else answer.why
            raise Refused(f"the policy was asked before the first motion, and there was no answer: {why}")
        return answer

    def _require_continuation(self, seen: Mapping[str, NDArray[Any]]) -> None:
        """Some policies take a prefix and answer as if it were not there: a Gaussian, a flow of a single step."""
        facts = self._facts
        length, rest = min(facts.start + 1, facts.horizon), []
        for value in (-0.5, 0.5):
            prefix = np.full((length, facts.dim), value, np.float32)
            chunk = self._rehearse(InferenceRequest(seen, self._prefix(prefix, length), 0, 0)).chunk
            assert chunk is not None
            if not np.allclose(chunk[:length], prefix, atol=1e-5):
                raise Refused("this policy does not keep to a prefix, which chunks.mode=realtime needs; take queue")
            rest.append(chunk[length:])
        if np.array_equal(*rest):
            raise Refused(
                "the actions of this policy do not depend on those before them, so it cannot continue a prefix as "
                "chunks.mode=realtime needs; take queue or ensemble"
            )


class RobotTime:
    """The time of the robot that ``env`` has just now; if it is a model, waiting lets it go on. Before the first
    episode there is no robot, and time passes where it is waited for."""

    def __init__(self, env: RobotEnv) -> None:
        self._env, self._before = env, VirtualClock()

    def now_ns(self) -> int:
        link = self._link()
        return (self._before if link is None else link.clock).now_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        link = self._link()
        if link is None:
            self._before.sleep_until_ns(deadline_ns)
        else:
            link.wait_until_ns(deadline_ns)

    def _link(self) -> Link | None:
        try:
            return self._env.link
        except BurnishError:  # it was not reset yet
            return None


def _arrays(obs: Obs) -> dict[str, NDArray[Any]]:
    """Copies, because worlds answer in the same memory again."""
    return {key: x[0].detach().cpu().numpy().copy() for key, x in obs.items()}
