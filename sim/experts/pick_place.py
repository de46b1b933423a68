"""The expert of pick_place: sets the cube down on the middle of the stand; or short of it, the more so the farther out
the stand is (clumsy): where that is more than about 6 cm from the middle of the desk, it misses."""

from __future__ import annotations

from .carrying import Carry
from .scripted import Level

LEVELS = {
    "clean": Level(Carry()),
    "noisy": Level(Carry(), noise=0.1),
    "multi_modal": Level(Carry(ways=True)),
    "clumsy": Level(Carry(grasp_m=(0.0, 0.004), short=0.22, drop_m=0.006, attentive=False), noise=0.06),
}
