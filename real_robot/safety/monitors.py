"""Two hazards that no single state shows: a sensor that hangs, and a joint that is stuck. Pure NumPy.

`Monitors.see` gets every new state with the set-points that the robot has, and says why the robot must stop, or "".

**Frozen.** A joint whose measurement stays where it is, to one step of its encoder (to the bit where the step is not
known), while its set-points move by more than ``frozen_rad``, gets ``frozen_s`` more to show any motion. A sensor that
hangs and a joint that is blocked look alike from here, and the robot must stop for both.

**Stalled.** A joint more than ``stall_rad`` from its set-point, with more than ``stall_share`` of its greatest effort,
that comes no farther than ``stall_rad`` in ``stall_s``. Greatest efforts are those of `Adapter.strongest`; where the
robot measures no effort, or the greatest one is unknown, this says nothing, and `following` is what is left.

**No false alarms.** The first needs set-points that move, the second an effort near the greatest one and a set-point
that is not reached. So a joint that is to stand still and does is never frozen, with or without noise, and one that
holds a load below that effort is never stalled. A state that is late, and a joint that starts late, have ``frozen_s``.
"""

from __future__ import annotations

import numpy as np

from ..adapter import RobotSpec, RobotState, Vector
from ..clock import SECOND, ns
from .guard import numbers
from .settings import Safety

ROUNDING = 1e-9  # relative, of a step of the encoder: positions are differences of whole steps in float64


class Monitors:
    """``begin`` before the first ``see``."""

    def __init__(self, spec: RobotSpec, safety: Safety) -> None:
        self._spec, self._safety = spec, safety
        self._step = spec.column("quantum") * (1 + ROUNDING)

    def begin(self, state: RobotState, sent: Vector, strongest: Vector, now_ns: int) -> None:
        """At rest. ``strongest`` (n,) in Nm, NaN where it is unknown."""
        self._enough = self._safety.stall_share * strongest
        self._low, self._high = state.q.copy(), state.q.copy()  # of what was measured since it was seen to move
        self._least, self._most = sent.copy(), sent.copy()  # and of the set-points since then
        self._at = state.q.copy()  # where the joint may be stuck
        self._moving_ns, self._free_ns = np.full((2, len(sent)), now_ns)

    def see(self, state: RobotState, sent: Vector, now_ns: int) -> str:
        return self._frozen(state.q, sent, now_ns) or self._stalled(state, sent, now_ns)

    def _frozen(self, q: Vector, sent: Vector, now_ns: int) -> str:
        self._low, self._high = np.minimum(self._low, q), np.maximum(self._high, q)
        self._least, self._most = np.minimum(self._least, sent), np.maximum(self._most, sent)
        moved = self._high - self._low > self._step
        for mine, anew in ((self._low, q), (self._high, q), (self._least, sent), (self._most, sent)):
            mine[moved] = anew[moved]
        asked = self._most - self._least
        self._moving_ns[asked <= self._safety.frozen_rad] = now_ns
        still_ns = now_ns - self._moving_ns
        worst = int(still_ns.argmax())
        if still_ns[worst] <= ns(self._safety.frozen_s):
            return ""
        return (
            f"{self._spec.joints[worst].name} has been measured at one place for {still_ns[worst] / SECOND:.2f} s, "
            f"though its set-points moved by {asked[worst]:.2f} rad: its sensor hangs, or it is blocked"
        )

    def _stalled(self, state: RobotState, sent: Vector, now_ns: int) -> str:
        effort = None if state.effort is None else numbers(state.effort, sent.shape)
        if effort is None:
            return ""
        behind, far = np.abs(state.q - sent), self._safety.stall_rad
        stuck = (behind > far) & (np.abs(effort) > self._enough) & (np.abs(state.q - self._at) <= far)
        self._free_ns[~stuck] = now_ns
        self._at[~stuck] = state.q[~stuck]
        stuck_ns = now_ns - self._free_ns
        worst = int(stuck_ns.argmax())
        if stuck_ns[worst] <= ns(self._safety.stall_s):
            return ""
        return (
            f"{self._spec.joints[worst].name} has been stuck for {stuck_ns[worst] / SECOND:.2f} s, "
            f"{behind[worst]:.2f} rad from its set-point, with {abs(effort[worst]):.2f} Nm"
        )
