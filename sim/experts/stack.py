"""The expert of stack: sets the red cube down on the middle of the blue one; or short of it, the more so the farther
out that is (clumsy): where it is more than about 7 cm from the middle of the desk, the red cube is too far off."""

from __future__ import annotations

from .carrying import Carry
from .scripted import Level

LEVELS = {
    "clean": Level(Carry()),
    "noisy": Level(Carry(), noise=0.1),
    "multi_modal": Level(Carry(ways=True)),
    "clumsy": Level(Carry(grasp_m=(0.0, 0.003), short=0.155, drop_m=0.003, attentive=False), noise=0.06),
}
