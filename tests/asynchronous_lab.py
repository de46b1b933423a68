"""Small things to act and learn with in two processes, which a spawned process finds by name; and threads in the place
of processes, where a test wants to look at both sides, or has not the seconds that a process takes to start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import control_lab
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.processes.actor_process import run_actor
from burnish.finetune.processes.asynchronous import Asynchronous, AsynchronousConfig
from burnish.offline.replay import Replay
from burnish.offline.sac import SAC, SACConfig, soft_agent
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.types import Decision, Learner, Metrics, Obs, Source, Step
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.nets.critic import CriticConfig
from burnish.policies.runs.checkpoint import numbered
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

Pause = Callable[[], float]  # seconds


class Slow(Wrapper):
    """A world that takes its time."""

    def __init__(self, env: Any, pause: Pause) -> None:
        super().__init__(env)
        self.pause, self.closed = pause, False

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        assert not self.closed, "nobody moves a robot that was let go"
        time.sleep(self.pause())
        return self.env.step(action, active)

    def close(self) -> None:
        self.closed = True


class Teller(Learner):
    """Its weights are the number of its updates, which its actor writes beside every decision."""

    columns = ("executed",)

    def __init__(self, execute: int, dim: int, pause: Pause = lambda: 0.0) -> None:
        self.weights, self.pause, self.shape = torch.zeros((), dtype=torch.int64), pause, (execute, dim)
        self.actor: Any = SimpleNamespace(act=self._act, state_dict=self.state_dict)
        self.policy = None
        self.before: Callable[[], None] = lambda: None  # of each update

    def _act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Any = None) -> Decision:
        count = len(obs["state"])
        action = torch.rand(count, *self.shape, generator=generator)
        who = torch.full((count,), generator.initial_seed() % 2**31)  # each actor has a seed of its own
        return Decision(action, {"heard": self.weights.repeat(count), "warm": torch.full((count,), warm), "who": who})

    def update(self, source: Source) -> Metrics:
        source.sample()
        self.before()
        time.sleep(self.pause())
        self.weights += 1
        return {"loss": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"])


PLAIN = OffPolicyConfig(capacity=4000, warmup=8, updates_per_decision=0.75, batch=4)


class Telling(NamedTuple):
    """What to make of it; a spawned process gets this, so it is plain."""

    loop: OffPolicyConfig
    world_pause_s: float = 0.0
    trouble: str = ""  # of the acting process
    actors: int = 1


LENGTHS = (5, 7)  # of the episodes of the two worlds, in ticks; a decision takes two
ENDS = [[(length, kind) for kind in (TERMINATED, TRUNCATED)] for length in LENGTHS]


def telling(config: Telling, seed: int) -> OffPolicy[Any]:
    torch.set_num_threads(1)
    if seed and config.trouble == "sentence":
        raise BurnishError("there is no world today")
    if seed and config.trouble == "child":
        for sign in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), sign)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        child.kill()  # nothing, where it has ended
        raise BurnishError(f"a child of one who heeds no signals ended by {child.wait()}")
    if seed and config.trouble == "bug":
        raise RuntimeError("an accident")
    ends = ENDS * (1 if seed else config.actors)  # the learner, of seed 0, knows the worlds of all
    env: Any = ScaledEnv(Slow(ScriptedWorld(ends), lambda: config.world_pause_s))
    replay = Replay(config.loop.capacity, len(ends))
    return OffPolicy(Teller(2, 2), ChunkEnv(env, 2, 0.9), replay, config.loop, seed=seed)


def small_sac(spec: Any, seed: int = 0) -> SAC:
    agent = soft_agent(hidden=[32, 32])
    settings: dict[str, Any] = {"agent": agent, "critic": CriticConfig(hidden=[32, 32]), "alpha": 0.1}
    made = SACConfig(lr=2e-3, actor_lr=2e-3, tau=0.02, **settings)
    return SAC(build_policy(made.agent, spec, seed=seed), made, seed=seed)


CONTROL = OffPolicyConfig(capacity=1200, warmup=200, updates_per_decision=0.6, batch=32)


def controlling(config: OffPolicyConfig, seed: int) -> OffPolicy[Any]:
    """SAC on a small LQR."""
    torch.set_num_threads(1)
    replay = Replay(config.capacity, 8, seed=seed)
    return OffPolicy(small_sac(control_lab.spec(), seed), control_lab.world(8, seed), replay, config, seed=seed)


# ---- threads in the place of processes ----


class Thread(threading.Thread):
    """Its death is that of its end of the pipe, whoever reads it still."""

    def __init__(self, connection: Any, make: Any, config: Any, orders: Any) -> None:
        super().__init__(daemon=True)
        self.exitcode: int | None = None
        self.loop: Any = None
        self.pid = 0
        self._line = socket.socket(fileno=os.dup(connection.fileno()))

        def watched(config: Any, seed: int) -> OffPolicy[Any]:
            self.loop = make(config, seed)
            return self.loop

        self._work = lambda: run_actor(connection, watched, config, orders, lost=lambda: None)

    def run(self) -> None:
        try:
            self._work()
            self.exitcode = 0
        except RuntimeError:
            self.exitcode = 1
        self.kill()

    def kill(self) -> None:
        with suppress(OSError):  # the other side was quicker
            self._line.shutdown(socket.SHUT_RDWR)


class Threads:
    """``launch`` of `Asynchronous`, which remembers whom it launched."""

    def __init__(self) -> None:
        self.launched: list[Thread] = []

    def __call__(self, make: Any, config: Any, orders: Any) -> tuple[Any, Any]:
        ours, theirs = Pipe()
        self.launched.append(Thread(theirs, make, config, orders))
        self.launched[-1].start()
        return self.launched[-1], ours


def killed(process: Any) -> None:
    """As abruptly as can be: -9, or hung up in the middle of whatever is being said."""
    if isinstance(process, Thread):
        process.kill()
    else:
        os.kill(process.pid, signal.SIGKILL)


def together(make: Any, config: Any, terms: AsynchronousConfig | None = None, **options: Any) -> Asynchronous:
    return Asynchronous(make(config, 0), make, config, terms or AsynchronousConfig(), **options)


# ---- time, and who is alive ----


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A test that hangs fails, with the place where it hung."""

    def late(number: int, frame: Any) -> None:
        raise AssertionError(f"not over within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def alive(pid: int) -> bool:
    """A process that nobody has waited for yet is dead all the same."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not Path("/proc").is_dir()


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [deeper for child in found for deeper in descendants(child)]


# ---- the command ----

CODE = "import sys, torch; torch.set_num_threads(1); from burnish.policies.cli.cli import main; sys.exit(main())"
TINY = ["method.loop.warmup=40", "method.loop.batch=8", "method.loop.updates_per_decision=0.5"]
TINY += [f"method.sac.{word}" for word in ("critic.hidden=[8]", "critic.members=2", "agent.hidden=[8]")]
RUN = ["finetune", "method=rlpd", "env=point_reach", "worlds=2", "total=400", "log_every=80", "save_every=80"]
RUN += ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2", "processes=2", *TINY]


def begun(folder: Path, *more: str) -> tuple[subprocess.Popen, list[int], int]:
    """The command in a process group of its own, once it has saved something anew; its children; what it has saved."""
    had, words = newest_step(folder), [*RUN, *more, f"out={folder}", "resume=true"]
    process = subprocess.Popen([sys.executable, "-c", CODE, *words], stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while newest_step(folder) == had:
        assert process.poll() is None and time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
    return process, descendants(process.pid), newest_step(folder)


def newest_step(folder: Path) -> int:
    return max((int(path.name) for path in numbered(folder / "checkpoints")), default=0)


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)
