"""An arm of four capsules beside a post, with an oracle that measures its clearance without any of our code."""

from __future__ import annotations

import mujoco
import numpy as np

from burnish.real_robot.safety.guard import Limits

# Four joints and a post to run into; every shape is a capsule, so the oracle needs only distances of segments.
CAPSULES = """
<mujoco>
  <worldbody>
    <geom name="post" type="capsule" fromto="0.3 0.1 0.05 0.3 0.1 0.4" size="0.03"/>
    <body name="base" pos="0 0 0.1">
      <joint name="pan" axis="0 0 1"/>
      <geom name="column" type="capsule" fromto="0 0 0 0 0 0.2" size="0.05"/>
      <body name="upper" pos="0 0 0.25">
        <joint name="lift" axis="0 1 0"/>
        <geom name="upper" type="capsule" fromto="0.05 0 0 0.25 0 0" size="0.03"/>
        <body name="fore" pos="0.3 0 0">
          <joint name="elbow" axis="0 1 0"/>
          <geom name="fore" type="capsule" fromto="0.05 0 0 0.2 0 0" size="0.025"/>
          <body name="hand" pos="0.25 0 0">
            <joint name="wrist" axis="0 1 0"/>
            <geom name="hand" type="capsule" fromto="0.03 0 0 0.12 0 0" size="0.02"/>
            <site name="tool" pos="0.14 0 0"/>
          </body>
        </body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
PAIRS = [("column", "fore"), ("column", "hand"), ("upper", "hand"), *(("post", x) for x in ("upper", "fore", "hand"))]
LIMITS = Limits(np.full(4, -2.8), np.full(4, 2.8), np.full(4, 2.0), np.full(4, 8.0), 0.02)
START = np.array([1.8, 1.2, -1.65, 0.1])
BOX = {"tool_lower_m": (-0.5, -0.5, 0.1), "tool_upper_m": (0.5, 0.5, 0.75)}
MARGIN = 0.015


def segments_apart(p: np.ndarray, q: np.ndarray, r: np.ndarray, s: np.ndarray) -> float:
    """Between p..q and r..s: the least over ends against segments, and over inner points where lines are nearest."""

    def from_point(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
        t = np.clip((x - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
        return float(np.linalg.norm(x - a - t * (b - a)))

    least = min(from_point(p, r, s), from_point(q, r, s), from_point(r, p, q), from_point(s, p, q))
    u, v, w = q - p, s - r, p - r
    a, b, c, d, e = u @ u, u @ v, v @ v, u @ w, v @ w
    cross = a * c - b * b
    if cross > 1e-12:
        i, j = (b * e - c * d) / cross, (a * e - b * d) / cross
        if 0 <= i <= 1 and 0 <= j <= 1:
            least = min(least, float(np.linalg.norm(w + i * u - j * v)))
    return least


class Oracle:
    """Clearance of the capsule arm without any of the filter's code."""

    def __init__(self, box: bool) -> None:
        self.model = mujoco.MjModel.from_xml_string(CAPSULES)
        self.data, self.box = mujoco.MjData(self.model), box

    def ends(self, name: str) -> tuple[np.ndarray, np.ndarray, float]:
        i = self.model.geom(name).id
        axis, (radius, half) = self.data.geom_xmat[i, 2::3], self.model.geom_size[i, :2]
        return self.data.geom_xpos[i] - half * axis, self.data.geom_xpos[i] + half * axis, radius

    def __call__(self, q: np.ndarray) -> float:
        self.data.qpos[:] = q
        mujoco.mj_kinematics(self.model, self.data)
        least = min(min(a[2], b[2]) - r for a, b, r in map(self.ends, ("column", "upper", "fore", "hand")))
        for one, other in PAIRS:
            (a, b, r), (c, d, s) = self.ends(one), self.ends(other)
            least = min(least, segments_apart(a, b, c, d) - r - s)
        if self.box:
            tool = self.data.site_xpos[0]
            least = min(least, (tool - BOX["tool_lower_m"]).min(), (BOX["tool_upper_m"] - tool).min())
        return float(least)
