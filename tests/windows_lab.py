"""A program: our modules see Python as Windows has it, all of them are imported, and a policy is trained and judged.

Nothing here has been on Windows. What it takes away are the modules and names that the documentation of Python gives to
POSIX alone, from ``burnish.*`` only: packages of others see to Windows themselves. ``os.name`` says "nt", so our own
branches for Windows are taken; a folder cannot be opened, nor a file that is mapped removed.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pkgutil
import signal
import sys
import types
from pathlib import Path
from typing import Any

POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "os": {
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "forkpty", "geteuid"),
        *("getgid", "getpgid", "getsid", "getuid", "killpg", "memfd_create", "mkfifo", "nice", "openpty", "setsid"),
        *(
            "pipe2",
            "sched_getaffinity",
            "sched_setaffinity",
            "sched_setscheduler",
            "sysconf",
            "uname",
            "wait3",
            "wait4",
        ),
    },
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask", "setitimer"},
}
EXTRAS = {"lerobot", "mani_skill", "msgpack", "stable_baselines3", "tokenizers", "websockets"}  # they may be missing


class Windows(types.ModuleType):
    """A module of Python without what POSIX alone has."""

    def __init__(self, module: types.ModuleType, **changed: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, **changed)

    def __getattr__(self, name: str) -> Any:
        if name in POSIX_NAMES[self.__name__]:
            raise AttributeError(f"{self.__name__}.{name} does not exist on Windows", name=name)
        return getattr(self._module, name)


def open_file(path: Any, flags: int, *more: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return os.open(path, flags, *more)


def unlink(path: Any) -> None:
    if os.path.realpath(path) in Path("/proc/self/maps").read_text():
        raise PermissionError(13, "the file is in use", str(path))
    os.unlink(path)


MODULES = {"os": Windows(os, name="nt", open=open_file, unlink=unlink), "signal": Windows(signal)}
importing = builtins.__import__


def import_on_windows(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    who = (globals or {}).get("__name__", "")
    if who.startswith("burnish.") and not level:
        if name.partition(".")[0] in POSIX_MODULES:
            raise ImportError(f"{who} imports {name}, which does not exist on Windows")
        if name in MODULES:
            return MODULES[name]
    return importing(name, globals, locals, fromlist, level)


def import_all() -> int:
    """All modules but those that drive robots, which need Linux."""
    count = 0
    for package in ("policies", "sim", "finetune", "offline", "configs"):
        path = importlib.import_module(f"burnish.{package}").__path__
        for module in pkgutil.walk_packages(path, f"burnish.{package}."):
            try:
                importlib.import_module(module.name)
                count += 1
            except ModuleNotFoundError as error:
                if error.name not in EXTRAS:
                    raise
    return count


def play(folder: str) -> None:
    """Recorded, continued, imitated, refined, resumed, judged."""
    main = importlib.import_module("burnish.policies.cli.cli").main
    few = ["eval.episodes=2", "eval.worlds=2"]
    collect = ["collect", "env=point_reach", "env.max_steps=12", f"out={folder}/data"]
    flow = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    refine = [
        "finetune",
        "method=dsrl",
        f"policy.path={folder}/bc",
        f"out={folder}/refined",
        "worlds=2",
        "save_every=8",
    ]
    small = ["method.sac.critic.hidden=[8]", "method.sac.critic.members=2", "method.sac.agent.hidden=[8]"]
    loop = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.place=file", "eval.confirm=2"]
    gym = [
        "finetune",
        "method=rlpd",
        "env=gym",
        "env.id=Pendulum-v1",
        "env.max_steps=8",
        f"out={folder}/gym",
        "worlds=2",
    ]
    for words in (
        [*collect, "episodes=4"],
        [*collect, "episodes=6", "resume=true"],
        ["pretrain", *flow, f"data={folder}/data", f"out={folder}/bc", *few],
        [*refine, *small, *loop, *few, "total=16"],
        [*refine, *small, *loop, *few, "total=16", "resume=true"],
        ["evaluate", f"policy.path={folder}/refined", *few],
        [*gym, *small, *loop, *few, "total=16"],
    ):
        if main(words):
            sys.exit(f"burnish {' '.join(words)} failed")


if __name__ == "__main__":
    builtins.__import__ = import_on_windows
    sys.stdout.write(f"imported {import_all()}\n")
    play(sys.argv[1])
    sys.stdout.write("trained\n")
