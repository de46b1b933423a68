"""Loads what strangers made, in a process that watches itself.

As a program (``python artefact_lab.py ROOT``) it takes lines of JSON, ``{"way": ..., "words": [...]}``, and answers
each with what became of it: the exit status, what was said, seconds of processor time, and every act that an
artefact has no business with. Modules are imported once; each artefact has a forked process of its own, with bounds of
memory and time. What is watched are Python's audit events: files opened for writing, removed, renamed or linked outside
ROOT/out, anything opened below ROOT/outside, processes, sockets, pickles, and code or modules out of an artefact.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 10  # of processor time, for one artefact
WALL_S = 30  # for what only waits; others use the machine too
MEMORY = 3 << 30  # bytes of addresses beyond those that the imports take

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What no loading of anything needs.
NEVER = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
    "pickle.find_class", "webbrowser.open", "ftplib.connect", "smtplib.connect", "urllib.Request", "code.__new__",
    "os.kill", "os.putenv", "ctypes.dlsym/handle", "builtins.input",
)  # fmt: skip
# And these only below ROOT/out.
CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
    "os.utime", "shutil.rmtree", "shutil.copyfile", "shutil.move", "shutil.copytree", "tempfile.mkstemp",
    "tempfile.mkdtemp",
)  # fmt: skip


class Watch:
    """An audit hook cannot be taken off again; it can sleep."""

    def __init__(self, root: Path) -> None:
        self.root, self.armed = str(root.resolve()), False
        self.out, self.outside = f"{self.root}/out", f"{self.root}/outside"
        self.acts: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        self.armed = False  # what the hook does itself is no act
        try:
            found = self._act(event, given)
            if found:
                self.acts.append(f"{event}: {found}"[:300])
        finally:
            self.armed = True

    def _act(self, event: str, given: tuple[Any, ...]) -> str:
        if event == "open":
            path, mode, flags = given
            place = self._place(path)
            writes = (isinstance(flags, int) and flags & WRITING) or any(x in str(mode or "") for x in "wax+")
            if writes and not place.startswith((self.out, "/dev/null")):
                return f"{place} for writing"
            return place if place.startswith(self.outside) else ""
        if event in NEVER:
            return repr(given)
        if event in CHANGES:
            places = [self._place(x) for x in given if isinstance(x, (str, bytes, os.PathLike))]
            return ", ".join(x for x in places if not x.startswith(self.out))
        if event == "import":
            return str(given[:2]) if given[1] and str(given[1]).startswith(self.root) else ""
        if event == "exec":
            name = str(getattr(given[0], "co_filename", given[0]))
            return name if name.startswith(self.root) or "CANARY" in name else ""
        if event == "compile":
            source = given[0] if isinstance(given[0], (str, bytes)) else b""
            return "an artefact's text" if "CANARY" in str(source) else ""
        return ""

    def _place(self, path: Any) -> str:
        return os.path.realpath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""


# ---- ways to load: each gives an exit status, and says what went wrong on stderr ----


def by_command(words: list[str]) -> int:
    from burnish.policies.cli.cli import main

    return main(words)


def by_hand(load: Callable[[str], Any]) -> Callable[[list[str]], int]:
    """As a program would call a loader, with our own errors as the sentence."""

    def way(words: list[str]) -> int:
        from burnish.policies.core.errors import BurnishError
        from burnish.real_robot.errors import RobotError

        try:
            load(*words)
        except (BurnishError, RobotError) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        return 0

    return way


def _checkpoint(path: str) -> Any:
    from burnish.policies.build import load_policy

    return load_policy(path)


def _acted(path: str) -> Any:
    """A policy is loaded, and asked once about an observation that shows nothing."""
    import torch

    from burnish.policies.build import load_policy
    from burnish.policies.controllers import controller_for
    from burnish.policies.core.spec import dtype_of

    policy, _ = load_policy(path)
    blank = {key: torch.zeros(1, *shape, dtype=dtype_of(key)) for key, shape in policy.spec.inputs.shapes.items()}
    return controller_for(policy, 1).step(blank)


def _played(path: str) -> Any:
    """The same of a bundle."""
    import numpy as np

    from burnish.real_robot.export.runtime import load

    policy = load(path)
    return policy.act({key: np.zeros(shape, np.float32) for key, shape in policy.schema.obs.items()}, greedy=True)


def _newest(path: str) -> Any:
    from burnish.policies.runs import checkpoint

    return checkpoint.newest(path)


def _bundle(path: str) -> Any:
    from burnish.real_robot.export.runtime import load

    return load(path)


def _dataset(path: str) -> Any:
    from burnish.policies.data.lerobot import read_lerobot

    return read_lerobot(path)


def _states(path: str) -> Any:
    from burnish.policies.data.lerobot_sim_state import read_sim_state

    return read_sim_state(path, 0, 0)


def _calibration(path: str) -> Any:
    from burnish.real_robot.drivers.calibration import Calibration

    return Calibration.load(path)


# Controls: what others do with such files.


def _unpickled(path: str) -> Any:
    import pickle

    return pickle.loads(Path(path).read_bytes())


def _unsafe_yaml(path: str) -> Any:
    import yaml

    return yaml.load(Path(path).read_text(), yaml.UnsafeLoader)


def _instantiated(path: str) -> Any:
    import yaml
    from hydra.utils import instantiate

    return instantiate(yaml.safe_load(Path(path).read_text()))


def _imported(path: str) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("canary", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _written(path: str) -> Any:
    Path(path).write_text("touched")


def _read(path: str) -> Any:
    return Path(path).read_bytes()


def _endless(path: str) -> Any:
    while True:
        pass


LOADERS = {
    "checkpoint": _checkpoint, "newest": _newest, "bundle": _bundle, "dataset": _dataset, "calibration": _calibration,
    "states": _states, "acted": _acted, "played": _played,
    "unpickled": _unpickled, "unsafe_yaml": _unsafe_yaml, "instantiated": _instantiated, "imported": _imported,
    "written": _written, "read": _read, "endless": _endless,
}  # fmt: skip
WAYS: dict[str, Callable[[list[str]], int]] = {"command": by_command}
WAYS |= {name: by_hand(load) for name, load in LOADERS.items()}


def alone(watch: Watch, way: str, words: list[str], seconds: int, report: Path, said: Path) -> None:
    """In a forked process, which ends here."""
    os.setpgid(0, 0)
    place = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(place, 1)
    os.dup2(place, 2)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + int(time.process_time()) + 1,) * 2)
    began, status, before = time.process_time(), -1, resident()
    watch.armed = True
    try:
        status = WAYS[way](words)
    except BaseException as error:  # a traceback is what we look for
        status = 1
        sys.stderr.write(f"Traceback: {type(error).__name__}: {str(error)[:300]}\n")
    watch.armed = False
    sys.stderr.flush()
    found = {"status": status, "acts": watch.acts, "cpu_s": time.process_time() - began}
    found["grown"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    report.write_text(json.dumps(found))
    os._exit(0)


def resident() -> int:
    """Bytes of memory that this process has now. Its maximum, which is asked for at the end, begins there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def outcome(watch: Watch, root: Path, job: dict[str, Any]) -> dict[str, Any]:
    report, said = root / "report.json", root / "said.txt"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        alone(watch, job["way"], job["words"], job.get("seconds", SECONDS), report, said)
    deadline, ended = time.monotonic() + WALL_S, 0
    while not ended and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)
    if not ended:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = json.loads(report.read_text()) if report.exists() else {"status": None, "acts": [], "cpu_s": None}
    found["said"] = said.read_text(errors="replace") if said.exists() else ""
    found["ended"] = "in time" if ended and report.exists() else f"killed ({code})" if ended else "hangs"
    return found


def main(root: str) -> None:
    import pyarrow
    import torch

    torch.set_num_threads(1)
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    watch = Watch(Path(root))
    ready = False
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("warm"):  # imports what is imported late
            WAYS[job["way"]](job["words"])
            continue
        if not ready:
            os.environ["CANARY_SECRET"] = "SECRET"
            ready = True
        sys.stdout.write("=" + json.dumps(outcome(watch, Path(root), job)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
