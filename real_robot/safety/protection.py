"""The stages between a request and a command: the joint guard, and limits that have no closed form behind it.

    request, speed -> leader (a guard) -> fallback (jerk, workspace, floor, the arm itself) -> guard -> set-point

Without limits of the second kind the guard is all there is. With them there are two: the *leader* shapes the request,
so that it keeps the joint limits and the share of speed; the fallback sends as much of it as leaves a way to stop that
is known to be free; and the *guard* says the last word, with what was really sent as its state.

**Why the joint limits hold.** Everything that is sent is an answer of the guard, whose theorem asks nothing about its
requests. So positions, velocities and accelerations are kept whatever stands before it, correct or not.

**Why the guard changes nothing that the fallback proposes.** A proposal q' with velocity v' is the first set-point of a
path to rest within [l', u'], the limits of `guard`, with |v_i| <= V and |a_i| <= A. Let v' >= 0 (else mirror). On that
path v_i >= v' - i A h, so until it first turns it leads on by at least D(v'), the travel of braking with all of A
(`guard`). The path stays below u', hence q' + D(v') <= u', that is v' <= vmax(u' - q); and |v'| <= V, |v' - v| <= A h.
So v' lies in the guard's interval. A request that keeps the limits is sent as it is, so what is sent is what was
verified. To rounding: where the guard does change the last bits, the fallback is told. Were it ever more, by
`ROUNDING_RAD`, or did the fallback fail, then it is broken, and the robot comes to rest by the guard alone (``lost``).

**Why the rest holds.** By the induction of `fallback`: what is sent begins a stopping plan that was checked whole. A
wish to be at rest, and a request that is no numbers, follow the plan in hand, which keeps the limit of jerk too. In the
first case they brake with all of A, as the guard does.

**No winding up.** The leader is ahead of what is sent only while a limit of jerk lets it be. Where constraints refuse
what it asks for, it is put back to what was sent: (q, v) of the guard is a state that the guard's theorem allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...policies.core.errors import reason
from ..adapter import RobotSpec, Vector
from ..errors import Refused
from .fallback import Fallback, FallbackResult
from .guard import Intervention, JointGuard, Limits
from .settings import Safety

if TYPE_CHECKING:
    from .collision import Collision

JERK = "jerk"  # the kind of intervention; those of constraints are named by `Collision`
ROUNDING_RAD = 1e-9
STOP_S = 3.0  # longer must a limit of jerk not make a stop


@dataclass(frozen=True, slots=True)
class Protected:
    """The result of a request."""

    q: Vector  # (n,), to be sent
    changed: bool  # not what was asked
    bad: bool  # it was no numbers
    kinds: tuple[str, ...]  # the limits that changed it


class Protection:
    """``reset`` before the first call, at the set-point that holds the robot where it is."""

    def __init__(self, limits: Limits, jerk: Vector | None = None, collision: Collision | None = None) -> None:
        self.lost = ""  # why the fallback cannot be relied on any more
        self._guard = self._leader = JointGuard(limits)
        self._collision = collision
        self._fallback: Fallback | None = None
        self._smooth = JERK if jerk is not None else Intervention.BRAKING.value
        # So many ticks takes a stop at most.
        self.longest = int(float((limits.velocity / limits.acceleration).max()) / limits.period_s) + 3
        if jerk is not None or collision is not None:
            self._guard = JointGuard(limits, inward=False)  # a path that is verified leads in
            self._fallback = Fallback(limits, jerk, [collision] if collision is not None else [])
            self._leader = JointGuard(limits)
            self.longest = max(self.longest, self._fallback.longest)

    @classmethod
    def of(cls, spec: RobotSpec, limits: Limits, safety: Safety) -> Protection:
        jerk = None
        if safety.jerk > 0:
            jerk = np.array([min(safety.jerk, joint.jerk or np.inf) for joint in spec.joints])
        made = cls(limits, jerk, _collision(spec, safety) if safety.bounded else None)
        if jerk is not None and made.longest * limits.period_s > STOP_S:
            raise Refused(
                f"with safety.jerk={safety.jerk:g} rad/s^3 a stop could take {made.longest * limits.period_s:.1f} s, "
                f"and {STOP_S:g} s are allowed; allow more jerk, or less speed (safety.share)"
            )
        return made

    @property
    def resting(self) -> bool:
        """The last set-point is where the robot stays if nothing is asked."""
        still = not self._guard.v.any()
        return still if self._fallback is None or self.lost else still and self._fallback.resting

    def reset(self, q: Any) -> Vector:
        """At rest at ``q``; refused where something is too near already."""
        self.lost = ""
        if self._fallback is not None:
            try:
                self._fallback.reset(q)
            except Refused as error:
                near = f" ({self._collision.refused})" if self._collision is not None else ""
                raise Refused(f"{error}{near}") from error
        self._leader.reset(q)
        return self._guard.reset(q)

    def state(self) -> tuple[Any, ...]:
        """All that decides what is sent next, but for ``lost``: what is broken stays so."""
        return self._guard.state(), self._leader.state(), self._fallback and self._fallback.state()

    def restore(self, state: tuple[Any, ...]) -> None:
        """Put back what ``state`` gave, where the device has not taken what was sent since."""
        guard, leader, fallback = state
        self._guard.restore(guard)
        self._leader.restore(leader)
        if self._fallback is not None:
            self._fallback.restore(fallback)

    def __call__(self, request: Any, speed: float = 1.0) -> Protected:
        """``speed`` in [0, 1] is the share of the velocity limits that may be used. None is the wish to be at rest."""
        if self._fallback is None:
            before_q, before_v = self._guard.q, self._guard.v
            guarded = self._guard(request, speed)
            kinds = self._why(request, before_q, before_v) if guarded.changed else ()
            return Protected(guarded.q, bool(guarded.changed), bool(guarded.bad), kinds)
        if self.lost:
            return Protected(self._guard(None).q, True, False, ())
        leader, before_q, before_v = self._leader, self._leader.q, self._leader.v
        led = leader(request, speed)
        kinds = self._why(request, before_q, before_v) if led.changed else ()
        held = self._verified(np.full_like(led.q, np.nan) if led.bad else led.q, speed)
        sent = self._guard(None if held is None else held.q).q
        if held is None or not np.abs(sent - held.q).max() <= ROUNDING_RAD:
            self.lost = self.lost or "the fallback proposed what the limits of the joints forbid"
            return Protected(sent, True, bool(led.bad), kinds)
        if (sent != held.q).any():
            self._fallback.follow(sent)
        if held.share < 1:
            leader.restore({**leader.state(), "q": self._guard.q, "v": self._guard.v})
        if held.changed and not led.bad:
            room = held.share < 1 and self._collision
            kinds = (*kinds, room.refused if room else self._smooth)
        return Protected(sent, bool(led.changed) or held.changed, bool(led.bad), kinds)

    def _verified(self, request: Vector, speed: float) -> FallbackResult | None:
        assert self._fallback is not None
        try:
            return self._fallback(request, speed)
        except Exception as error:  # whatever it meets: a filter that fails is a reason to brake, not to fall over
            self.lost = f"the fallback failed: {reason(error, named=True)}"
            return None

    def _why(self, request: Any, q: Vector, v: Vector) -> tuple[str, ...]:
        if request is None:
            return ()
        return tuple(kind.value for kind, holds in self._leader.why(request, q, v).items() if holds)


def _collision(spec: RobotSpec, safety: Safety) -> Collision:
    from .collision import Collision, Workspace  # MuJoCo, only where it is needed

    model: str | Path | None = spec.mjcf
    if safety.model:
        model = safety.model if safety.model.lstrip().startswith("<") else Path(safety.model)
    tool = safety.tool or spec.tool_site
    if model is None or tool is None:
        raise Refused(
            f"{spec.name} brings no model of itself with a site at its tool; say safety.model=<path of an MJCF file> "
            "and safety.tool=<name of a site>"
        )
    names = safety.model_joints or [joint.name for joint in spec.joints]
    if len(names) != len(spec.joints):
        raise Refused(f"safety.model_joints names {len(names)} joints, and {spec.name} has {len(spec.joints)}")
    low, high = safety.workspace or (None, None)
    workspace = Workspace(
        margin_m=safety.margin_m,
        floor_z_m=safety.floor_m,
        tool_lower_m=low,
        tool_upper_m=high,
        itself=safety.apart,
        may_touch=[(one, other) for one, other in safety.may_touch],
    )
    return Collision(model, tool, workspace, names, spec.column("quantum"))
