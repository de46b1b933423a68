"""The costs of an actor, of a learner and of their messages, measured one by one for `scale_costs.py`.

They are seconds of a processor, so that other work on the machine does not count. Straight lines are fitted to them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, get_context
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import percentile

import burnish.finetune.refinement as refining
from burnish.finetune.__main__ import GROUPS
from burnish.finetune.loops import OffPolicy
from burnish.finetune.processes.actor_process import ROW, TAKEN, WEIGHTS, adopt, as_row, of_rows
from burnish.finetune.processes.asynchronous import Asynchronous, AsynchronousConfig
from burnish.finetune.processes.mailbox import Mailbox, packed, unpack
from burnish.finetune.processes.ray_actors import FETCH, RECEIVE, RayActor, RayLine
from burnish.policies.cli.cli import compose, to_object
from burnish.sim import physics

BASES = Path(__file__).resolve().parent / "bases"
CASES = {
    "hopper": ["method=sac", "env=hopper"],
    "insert": ["method=dsrl", f"policy.path={BASES}/insert/policy"],
}
WORLDS = {"hopper": 1, "insert": 4}  # of one actor
WARMUP, BATCH = 300, 256  # decisions
PAUSE_S = 0.005  # before what is done once a row: in a run, too, its memory is not at hand any more
LATENCY = 10  # percentile of the turns of messages: those in which no other process held the core


def cpu_s(call: Callable[[], Any], count: int, pause_s: float = 0.0) -> list[float]:
    """Processor seconds of each of ``count`` calls, with a pause before each."""
    found = []
    for _ in range(count):
        time.sleep(pause_s)
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return found


def line_through(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope, of which neither is below 0; relative errors count alike."""
    slope, intercept = np.polyfit(xs, ys, 1, w=1 / np.asarray(ys))
    return max(0.0, float(intercept)), max(0.0, float(slope))


def settings(case: str, worlds: int, ratio: float = 1.0, actors: int = 0) -> refining.FinetuneConfig:
    loop = {"warmup": WARMUP, "initial_updates": 0, "updates_per_decision": ratio, "batch": BATCH}
    words = [*CASES[case], f"worlds={worlds}", f"processes={actors + 1}", "threads=1", "total=1000000000"]
    words += [f"method.loop.{name}={x}" for name, x in loop.items()]
    return to_object(compose("finetune", refining.FinetuneConfig, GROUPS["finetune"], words))


def built(case: str, worlds: int) -> OffPolicy[Any]:
    return refining_acting(settings(case, worlds), 0)


def acting(config: refining.FinetuneConfig, seed: int) -> OffPolicy[Any]:
    """In the acting process: as `burnish finetune` builds it, with one thread for its worlds."""
    physics.usable_cores = lambda: 1
    return refining_acting(config, seed)


refining_acting, refining.acting = refining.acting, acting


def acted(case: str, worlds: int, count: int) -> dict[str, Any]:
    """Seconds of the rows of an actor, and of their parts."""
    loop = built(case, worlds)
    spent = {"decide": 0.0, "tick": 0.0}
    messages: list[bytes] = []

    def watch(owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*words: Any, **options: Any) -> Any:
            began = time.process_time()
            answer = call(*words, **options)
            spent[name] += time.process_time() - began
            return answer

        setattr(owner, method, timed)

    watch(loop.learner.actor, "act", "decide")
    watch(loop.env, "step", "tick")

    def row() -> None:
        messages.append(packed(ROW, {**as_row(*loop.played(False)), "updates": 0, "waited_s": 0.0, "lasted_s": 0.0}))

    cpu_s(row, 3)
    spent.update(decide=0.0, tick=0.0)
    times = cpu_s(row, count)
    parts = {f"{name}_s": x / count for name, x in spent.items()}
    return {"worlds": worlds, "row_s": fmean(times), **parts, "times": times, "message": messages[-1]}


def stored(case: str, message: bytes, worlds: int, actors: int, count: int) -> float:
    """Seconds of joining the rows of ``actors`` and storing them."""
    loop = built(case, worlds * actors)

    def keep() -> None:
        obs, action, columns, outcome = of_rows([unpack(message[1:])] * actors, loop.env.device)
        loop.statistics.note(outcome)
        loop.store(obs, action, columns, outcome, warm=True)

    reading = fmean(cpu_s(lambda: unpack(message[1:]), count))
    cpu_s(keep, 3)
    return max(1e-9, fmean(cpu_s(keep, count, PAUSE_S)) - reading)


def updated(case: str, worlds: int, batches: Sequence[int], count: int) -> dict[int, list[float]]:
    """Seconds of updates of each batch."""
    loop, found = built(case, worlds), {}
    while len(loop.replay) < 500:
        loop.store(*loop.played(True), warm=True)
    for batch in batches:
        loop.config.batch = batch
        loop.mix(None, None)
        loop.learn(3)
        found[batch] = cpu_s(lambda: loop.learn(1), count)
    return found


def echo(line: Any, row: bytes) -> None:
    """The other end: a receipt is answered by a row."""
    while data := line.recv_bytes():
        if data[:1] == TAKEN:
            line.send_bytes(row)
    line.close()


class Echo(RayActor):
    """The same as a Ray actor."""

    def answer(self, row: bytes) -> None:
        echo(self, row)


def lines(row: bytes, ray: Any) -> tuple[Any, Callable[[bytes], Any]]:
    """A line to a process that echoes, here or on Ray; and what makes a message ready for several such lines."""
    if ray is None:
        ours, theirs = Pipe()
        # It touches neither torch nor its threads, so a fork will do.
        get_context("fork").Process(target=echo, args=(theirs, row), daemon=True).start()
        theirs.close()
        return ours, bytes
    made = ray.remote(num_cpus=1, concurrency_groups={RECEIVE: 1, FETCH: 1})(Echo).remote([str(x) for x in sys.path])
    made.answer.remote(row)
    return RayLine(ray, made), ray.put


def sent(row: bytes, actor: Any, ray: Any, count: int) -> dict[str, float]:
    """Seconds of the learner for a row and for weights, of the actor for weights; and how long an answer takes."""
    line, share = lines(row, ray)
    mail, turns = Mailbox(line), []

    def exchange() -> None:
        began = time.perf_counter()
        mail.send(TAKEN)
        message = mail.take(wait=True)
        turns.append(time.perf_counter() - began)
        assert message is not None
        message.read()

    cpu_s(exchange, count)
    turn_s = percentile(turns, LATENCY)
    message_s = fmean(cpu_s(exchange, count, PAUSE_S))
    content = {"updates": 0, "actor": actor.state_dict()}
    few = max(3, count // 10)
    pack_s = fmean(cpu_s(lambda: share(packed(WEIGHTS, content)), few, PAUSE_S))
    data, shared_data = packed(WEIGHTS, content), share(packed(WEIGHTS, content))
    post_s = fmean(cpu_s(lambda: mail.post(shared_data), few, PAUSE_S))
    exchange()  # all of them have arrived
    adopt_s = fmean(cpu_s(lambda: adopt(actor, unpack(data[1:])["actor"]), few, PAUSE_S))
    mail.stop()
    assert mail.take(wait=True) is None  # it has hung up
    return {"message": message_s, "turn": turn_s, "pack": pack_s, "post": post_s, "adopt": adopt_s}


def costs_of(case: str, quick: bool, ray: Any) -> dict[str, Any]:
    """Measurements and fits of a case; its ``costs`` by the way of its messages, with lists in the place of arrays."""
    count = 40 if quick else 200
    counts, batches, actors = ((1, 4), (BATCH,), (1, 4)) if quick else ((1, 2, 4, 8, 16), (64, 256, 1024), (1, 4, 16))
    worlds = WORLDS[case]
    rows = [acted(case, n, count if n == worlds else count // 3) for n in counts]
    mine = next(row for row in rows if row["worlds"] == worlds)
    message, times = mine["message"], np.array(mine["times"])
    base_s, world_s = line_through(counts, [row["row_s"] for row in rows])
    updates = updated(case, worlds, batches, count // 4)
    update_fit = line_through(batches, [fmean(x) for x in updates.values()]) if len(batches) > 1 else None
    storing = [stored(case, message, worlds, k, count // 4) for k in actors]
    store_s, keep_s = line_through(actors, storing)
    actor = built(case, worlds).learner.actor
    ways = {"mailbox": None} | ({} if ray is None else {"ray": ray})
    traffic = {way: sent(message, actor, x, count) for way, x in ways.items()}
    watch_s = fmean(cpu_s(watching(1000), 20)) / 1000
    shared = {
        "worlds": worlds,
        "rows": (times * (base_s + world_s * worlds) / times.mean()).tolist(),
        "updates": updates[BATCH],
        **{"keep": keep_s, "store": store_s, "watch": watch_s},
    }
    return {
        "case": case,
        "rows": [{key: x for key, x in row.items() if key not in ("times", "message")} for row in rows],
        "row_fit_s": {"fixed": base_s, "world": world_s},
        "updates_s": {batch: fmean(x) for batch, x in updates.items()},
        "update_fit_s": update_fit,
        "storing_s": dict(zip(actors, storing, strict=True)),
        "row_bytes": len(message),
        "weight_bytes": len(packed(WEIGHTS, actor.state_dict())),
        "costs": {way: {**shared, **x} for way, x in traffic.items()},
    }


def watching(actors: int) -> Callable[[], None]:
    """The look at each of ``actors`` that the learner takes at each update."""
    loop: Any = built("hopper", 1)
    both: Any = Asynchronous(loop, acting, None, AsynchronousConfig(), actors=actors)
    slots = both._slots
    for slot in slots:
        slot.handles.append(SimpleNamespace(mail=SimpleNamespace(closed=False)))

    def look() -> None:
        for slot in slots:
            both._watch(slot)

    return look
