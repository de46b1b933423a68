"""How fast the worlds' pictures are drawn, beside a loop over `mujoco.Renderer`.

    python benchmarks/render_speed.py [--quick] [--out FOLDER]

Pictures are 84x84, of all cameras of 16 and of 128 worlds in different states. Four ways to draw them take turns, each
in a process of its own, because Mesa reads its settings once per process:

* ``renderer``: one `mujoco.Renderer`, and over the worlds in turn `update_scene` and `render`, with the settings of the
  model as they are; the usual first version.
* ``renderer_plain``: the same loop without shadows, reflections and multisampling.
* ``plain``: ours, as policies see it by default.
* ``lavish``: ours, with the settings of ``renderer``.

RESULT: ``over_renderer`` and ``over_plain_renderer``, frames/s of ``plain`` over those of the two loops, each the worst
of scenes and numbers of worlds; ``frames_per_s`` of ``plain``, on `insert` with 16 worlds.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from measure import machine, markdown, options, page, publish, table
from tqdm import tqdm

from burnish.sim.build import make_env
from burnish.sim.gl import choose

SIZE = 84
CAMERAS = {"reach": ("front", "wrist"), "insert": ("front", "wrist"), "half_cheetah": ("track",)}
WAYS = ("renderer", "renderer_plain", "plain", "lavish")
WORLDS = (16, 128)


@functools.cache
def drawing(way: str, scene: str, worlds: int) -> Callable[[], Any]:
    """Called in the process of ``way``: a function that draws every camera of every world once."""
    import mujoco

    from burnish.sim.pixels import Pixels
    from burnish.sim.task import PixelConfig

    env: Any = make_env(scene, worlds)
    env.reset(seeds=list(range(worlds)))
    rng = np.random.default_rng(0)
    low, high = np.array(env.spec.action.low), np.array(env.spec.action.high)
    for _ in range(5):
        env.step(torch.from_numpy(rng.uniform(low, high, (worlds, len(low)))).float())
    physics, cameras = env.physics, CAMERAS[scene]
    if way in ("plain", "lavish"):
        pixels = Pixels(physics, PixelConfig(cameras, SIZE, way == "lavish"))
        pixels.draw(None)  # opens the contexts
        return functools.partial(pixels.draw, None)

    model = copy.copy(physics.model)
    if way == "renderer_plain":
        model.light_castshadow[:], model.mat_reflectance[:], model.vis.quality.offsamples = 0, 0, 0
    renderer = mujoco.Renderer(model, SIZE, SIZE)
    pictures = np.empty((len(cameras), worlds, SIZE, SIZE, 3), np.uint8)

    def loop() -> None:
        for i, data in enumerate(physics.data):
            for k, camera in enumerate(cameras):
                renderer.update_scene(data, camera)
                pictures[k, i] = renderer.render()

    return loop


def frames_per_s(way: str, scene: str, worlds: int, block: float) -> float:
    draw = drawing(way, scene, worlds)
    count, start = 0, time.perf_counter()
    while count == 0 or time.perf_counter() - start < block:
        draw()
        count += 1
    return count * worlds * len(CAMERAS[scene]) / (time.perf_counter() - start)


COLUMNS = {
    "scene": "",
    "worlds": "d",
    **dict.fromkeys(WAYS, ",.0f"),
    "over_renderer": ".1f",
    "over_plain_renderer": ".2f",
}


def main() -> None:
    parser = options(__doc__)
    chosen = parser.parse_args()
    rounds, block = (2, 0.05) if chosen.quick else (5, 0.5)
    numbers = WORLDS[:1] if chosen.quick else WORLDS
    backend = choose()
    os.environ["MUJOCO_GL"] = backend  # the loops draw with the same OpenGL; MuJoCo asks here at its import
    cases = [(scene, worlds) for scene in CAMERAS for worlds in numbers]
    rates: dict[tuple[str, str, int], list[float]] = {(way, *case): [] for way in WAYS for case in cases}
    spawn = multiprocessing.get_context("spawn")
    processes = {way: ProcessPoolExecutor(1, spawn) for way in WAYS}
    # In turns, so that a slow minute of the machine touches all alike.
    for _ in tqdm(range(rounds), disable=None):
        for case in cases:
            for way in WAYS:
                rates[way, *case].append(processes[way].submit(frames_per_s, way, *case, block).result())
    for process in processes.values():
        process.shutdown()

    rows = []
    for scene, worlds in cases:
        row: dict[str, Any] = {"scene": scene, "worlds": worlds, "cameras": len(CAMERAS[scene])}
        row |= {way: statistics.median(rates[way, scene, worlds]) for way in WAYS}
        for name, way in (("over_renderer", "renderer"), ("over_plain_renderer", "renderer_plain")):
            pairs = zip(rates["plain", scene, worlds], rates[way, scene, worlds], strict=True)
            row[name] = statistics.median(ours / theirs for ours, theirs in pairs)
        rows.append(row)
    about = machine(torch.device("cpu"))
    report = {"machine": about, "quick": chosen.quick, "backend": backend, "size": SIZE, "rounds": rounds, "rows": rows}
    head = f"{about['processor']}, {about['cores']} cores, load {about['load']}, {backend}, {SIZE}x{SIZE}, frames/s"
    insert = next(row for row in rows if (row["scene"], row["worlds"]) == ("insert", 16))
    result = {
        "over_renderer": min(row["over_renderer"] for row in rows),
        "over_plain_renderer": min(row["over_plain_renderer"] for row in rows),
        "frames_per_s": insert["plain"],
    }
    path = chosen.out / ("render_speed_quick.json" if chosen.quick else "render_speed.json")
    publish(path, report, f"{head}\n\n{table(rows, COLUMNS)}", result)
    page(path, markdown(rows, COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
