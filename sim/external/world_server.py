"""Environments of Gymnasium, made and stepped for a Burnish process, in whichever Python has them.

One file without dependencies but NumPy, for Python 3.8 and newer. Burnish starts it for its worker processes and for
worlds that live in another Python, and then it needs no arguments of yours. It serves a Burnish on another machine so:

    BURNISH_API_KEY=... python world_server.py --listen 0.0.0.0:7777 --id Foo-v0 [--package foo] [--kwargs '{"a": 1}']

A request is one letter, a header in JSON and some bytes; so is each answer. Actions, observations and rewards lie in a
block of memory that both sides lay out in the same way (`fields`, `arrays`): shared between processes of one machine,
and sent along, its first half with a request and its second half with an answer, between machines. No pickle.

    m  make {"recipe", "count"}     -> what the environment is (`Host.describe`)
    a  attach {"size"}              the memory, of so many bytes
    r  reset the worlds of `mask`, on `seeds`        s  step the worlds of `mask` by `action`
    p  play {"world", "seed"}: begin anew, and take the actions that follow     v  view {"world"} -> a picture
    t  take on {"expert"}: one beside each world     x  the action of the expert -> `advice`

An environment that fails answers ``e`` with its error, and the worker goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import hmac
import importlib
import importlib.util
import json
import mmap
import os
import random
import runpy
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

VERSION, GROUP = 1, "burnish.worlds"  # the latter of entry points
SUCCESS, UNREPORTED = ("success", "is_success"), 2  # the usual keys of an info; and where it says nothing
GENERATORS = ("_np_random", "rng")  # of an environment
HEAD = struct.Struct("<cII")  # letter, bytes of the header, bytes that follow it
LONGEST_HEADER, LONGEST_BYTES = 1 << 22, 1 << 30
KEY, HERE = "BURNISH_API_KEY", os.path.dirname(os.path.abspath(__file__))


def load(name: str) -> Any:
    """The object ``module:attribute``; of a file, ``/path/of.py:attribute``."""
    module, _, attribute = name.rpartition(":")
    if module.endswith(".py"):
        return runpy.run_path(module)[attribute]
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


@functools.lru_cache
def installed(name: str) -> Any:
    """The entry point of that name; None where no installed package has it."""
    from importlib.metadata import entry_points

    found: Any = entry_points()
    group = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return next((entry.load() for entry in group if entry.name == name), None)


def make(recipe: dict[str, Any], count: int = 0) -> Any:
    """One environment: of a callable, of an entry point, or registered; with ``count`` one of `gymnasium.vector`."""
    sys.path.extend(path for path in recipe.get("paths") or () if path not in sys.path)
    for package in recipe.get("packages") or ():
        importlib.import_module(package)
    name, kwargs = recipe["id"], {**(recipe.get("kwargs") or {}), **({"num_envs": count} if count else {})}
    if (made := load(name) if ":" in name else installed(name)) is not None:
        return made(**kwargs)
    try:
        import gymnasium as gym
    except ImportError:
        return importlib.import_module("gym").make(name, **kwargs)
    for package in recipe.get("guesses") or ():
        if name not in gym.registry and importlib.util.find_spec(package):
            importlib.import_module(package)
    if count:
        return gym.make_vec(name, **({"max_episode_steps": x} if (x := recipe.get("max_steps")) else {}), **kwargs)
    kwargs.setdefault("disable_env_checker", True)  # it would test in every step what is tested here
    return gym.make(name, max_episode_steps=recipe.get("max_steps"), **kwargs)


def leaves(space: Any, path: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The arrays of an observation space, each with the keys that lead to it, in the order of these keys."""
    if (inner := getattr(space, "spaces", None)) is not None:
        items = inner.items() if hasattr(inner, "items") else ((str(i), x) for i, x in enumerate(inner))
        for key, value in sorted(items, key=lambda item: str(item[0])):
            yield from leaves(value, (*path, str(key)))
        return
    kind = type(space).__name__
    array = {"dtype": str(space.dtype), "shape": list(space.shape)} if kind == "Box" else {"dtype": "", "shape": []}
    yield {"path": list(path), "kind": kind, **array}


def look_up(obs: Any, path: list[str]) -> Any:
    """The part of an observation to which the keys of ``path`` lead."""
    for key in path:
        obs = obs[int(key)] if isinstance(obs, (tuple, list)) else obs[key]
    return obs


def as_array(value: Any) -> np.ndarray:
    """A value as a NumPy array, be it one already, a number or a tensor."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


class Host:
    """Environments of one recipe, and the memory in which they and their user meet."""

    def __init__(self, recipe: dict[str, Any], worlds: list[Any]) -> None:
        self.recipe, self.worlds, world = recipe, worlds, worlds[0]
        self.leaves = list(leaves(getattr(world, "single_observation_space", world.observation_space)))
        self.box = getattr(world, "single_action_space", world.action_space)
        self.dim = int(np.prod(getattr(self.box, "shape", None) or ()))
        self.layout, self.success = fields(self.leaves, self.dim), recipe.get("success")
        self.experts: list[Any] = []
        self.seen: list[Any] = [None] * len(worlds)  # the last observation and info of each world

    def picture(self, i: int) -> Any:
        return self.worlds[i].render()

    def describe(self) -> dict[str, Any]:
        world, box = self.worlds[0], self.box
        inner, spec = getattr(world, "unwrapped", world), getattr(world, "spec", None)
        action = {"kind": type(box).__name__, "dtype": str(box.dtype or ""), "shape": list(box.shape or ())}
        if action["kind"] == "Box":
            action["low"], action["high"] = (x.ravel().astype(float).tolist() for x in (box.low, box.high))
        rates = {name: getattr(inner, name, None) for name in ("dt", "control_freq")}
        rates["render_fps"] = (getattr(world, "metadata", None) or {}).get("render_fps")
        return {
            "version": VERSION,
            "id": self.recipe["id"],
            "python": sys.version.split()[0],
            "observation": self.leaves,
            "action": action,
            "rates": {key: as_array(x).item(0) for key, x in rates.items() if isinstance(x, (int, float, np.number))},
            "max_steps": getattr(spec, "max_episode_steps", None) or getattr(world, "_max_episode_steps", None),
            "says": {name: getattr(inner, name, None) for name in ("action_mode", "notes")},
            "nondeterministic": bool(getattr(spec, "nondeterministic", False) or self.recipe.get("vector")),
            "render_mode": getattr(world, "render_mode", None),
        }

    def attach(self, memory: Any) -> None:
        self.memory, self.arrays = memory, arrays(memory, self.layout, len(self.worlds))
        self.rows = [self.arrays["obs." + ".".join(leaf["path"])] for leaf in self.leaves]

    def reset(self, i: int, seed: int) -> None:
        """On ``seed`` all that draws: the environment's generator before its wrappers draw from it (Meta-World's choose
        the goal so; robosuite's is seeded by nothing else), then as Gymnasium says; and the generators of NumPy and of
        Python, which are put back."""
        world, kept = self.worlds[i], (np.random.get_state(), random.getstate())
        np.random.seed(seed)
        random.seed(seed)
        held = vars(getattr(world, "unwrapped", world))
        for source in (held.get(name) for name in GENERATORS):
            if isinstance(source, np.random.Generator):  # others may hold the same one
                source.bit_generator.state = type(source.bit_generator)(seed).state
        try:
            found = world.reset(seed=seed)
        finally:
            np.random.set_state(kept[0])
            random.setstate(kept[1])
        self._see(i, *(found if isinstance(found, tuple) else (found, {})))
        if self.experts:
            self.experts[i].reset(*self.seen[i])

    def step(self, i: int, action: np.ndarray) -> None:
        """An old environment of four answers says by ``TimeLimit.truncated`` that it was cut off."""
        obs, reward, terminated, *rest = self.worlds[i].step(action.astype(self.box.dtype).reshape(self.box.shape))
        info = rest[-1]
        cut = rest[0] if len(rest) > 1 else info.get("TimeLimit.truncated", False)
        ended = bool(as_array(terminated).item(0)) and (len(rest) > 1 or not cut)
        self._see(i, obs, info)
        self.arrays["reward"][i], self.arrays["terminated"][i] = as_array(reward).item(0), ended
        self.arrays["truncated"][i] = bool(as_array(cut).item(0)) and not ended
        self.arrays["success"][i] = self._succeeded(info, ended)

    def _succeeded(self, info: dict[str, Any], ended: bool) -> int:
        if self.success == "terminated":
            return int(ended)
        key = next((key for key in ((self.success,) if self.success else SUCCESS) if key in info), None)
        return UNREPORTED if key is None else int(bool(as_array(info[key]).item(0)))

    def _see(self, i: int, obs: Any, info: Any) -> None:
        self.seen[i] = (obs, info)
        for row, leaf in zip(self.rows, self.leaves):
            value = as_array(look_up(obs, leaf["path"]))
            rounded = value.dtype.kind == "f" and row.dtype.kind in "iub"
            if rounded or list(value.shape) != leaf["shape"]:  # in silence it would be rounded, or broadcast
                found = f"{value.dtype} of shape {value.shape}"
                raise ValueError(f"it declares {leaf['path']} as {row.dtype} of shape {leaf['shape']}, not {found}")
            row[i] = value

    def answer(self, letter: bytes, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if letter == b"t":
            if header["expert"] not in self.recipe.get("experts", [header["expert"]]):
                raise ValueError("this server does not offer that expert; start it with --expert NAME")
            self.experts = [load(header["expert"])(world) for world in self.worlds]
            for expert, seen in zip(self.experts, self.seen):
                if seen is not None:
                    expert.reset(*seen)
            still, levels = (getattr(self.experts[0], name, None) for name in ("still", "levels"))
            return {"levels": levels, "still": None if still is None else as_array(still).tolist()}, b""
        if letter == b"v":
            picture = np.ascontiguousarray(self.picture(header["world"]), np.uint8)
            return {"shape": list(picture.shape)}, picture.tobytes()
        if letter == b"p":
            i, played = header["world"], np.frombuffer(data, np.float64).reshape(-1, self.dim)
            self.reset(i, header["seed"])
            for action in played:
                if self.experts:
                    self.experts[i].act(*self.seen[i])  # it may remember what it has done
                self.step(i, action)
            return {}, b""
        a = self.arrays
        for i in np.flatnonzero(a["mask"]).tolist():
            if letter == b"r":
                self.reset(i, int(a["seeds"][i]))
            elif letter == b"s":
                self.step(i, a["action"][i])
            elif letter == b"x":
                a["advice"][i] = np.ravel(self.experts[i].act(*self.seen[i]))
            else:
                raise ValueError(f"there is no request {letter!r}")
        return {}, b""


def host_of(recipe: dict[str, Any], count: int) -> Host:
    """``count`` environments. Those of `gymnasium.vector` need the file `vector_worlds.py` beside this one."""
    if not recipe.get("vector"):
        return Host(recipe, [make(recipe) for _ in range(count)])
    beside = runpy.run_path(os.path.join(HERE, "vector_worlds.py"), {"server": sys.modules[__name__]})
    return beside["Batch"](recipe, [make(recipe, count)] * count)


def fields(observation: list[dict[str, Any]], dim: int) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Name, type, shape of a row, and whether it goes to the worlds; those that do stand first."""
    given = [("action", "float64", (dim,), True), ("seeds", "int64", (), True), ("mask", "uint8", (), True)]
    made = [("reward", "float64", (), False), ("advice", "float64", (dim,), False)]
    made += [(name, "uint8", (), False) for name in ("terminated", "truncated", "success")]
    seen = [("obs." + ".".join(x["path"]), x["dtype"], tuple(x["shape"]), False) for x in observation]
    return [*given, *made, *seen]


def sizes(layout: list[tuple[str, str, tuple[int, ...], bool]], count: int) -> tuple[int, int]:
    """Bytes of the part that goes to the worlds, and of all."""
    ends = [0, 0]
    for _, dtype, shape, given in layout:
        size = count * int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        ends[not given] += -(-size // 64) * 64
    return ends[0], ends[0] + ends[1]


def arrays(memory: Any, layout: list[tuple[str, str, tuple[int, ...], bool]], count: int) -> dict[str, np.ndarray]:
    """Views (count, ...) of the memory, each beginning at a multiple of 64 bytes."""
    found, start = {}, 0
    for name, dtype, shape, _ in layout:
        size = count * int(np.prod(shape, dtype=np.int64))
        found[name] = np.frombuffer(memory, dtype, size, start).reshape(count, *shape)
        start += -(-size * np.dtype(dtype).itemsize // 64) * 64
    return found


def send(connection: socket.socket, letter: bytes, header: dict[str, Any], data: Any = b"") -> None:
    """A message, sent: its letter, its header as JSON, and its bytes."""
    text = json.dumps(header, default=lambda _: None).encode() if header else b""  # an environment may say anything
    connection.sendall(b"".join((HEAD.pack(letter, len(text), len(data)), text, data)))


def receive(connection: socket.socket) -> tuple[bytes, dict[str, Any], bytes]:
    """EOFError where the other side is gone; ValueError for what is no message."""
    letter, header, data = HEAD.unpack(exactly(connection, HEAD.size))
    if header > LONGEST_HEADER or data > LONGEST_BYTES:
        raise ValueError("a message is longer than any of ours")
    text = exactly(connection, header)
    found = json.loads(text) if text else {}
    if not isinstance(found, dict):
        raise ValueError("the header of a message is no mapping")
    return letter, found, exactly(connection, data)


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes of a connection; EOFError where it ends before."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def proof(key: str, nonce: str, side: str) -> str:
    """The HMAC of side and nonce under ``key``, in hex."""
    return hmac.new(key.encode(), (side + nonce).encode(), hashlib.sha256).hexdigest()


def proven(connection: socket.socket, key: str) -> bool:
    """The server's side: who holds the key proves it over a nonce, and so does the server. No key needs no proof."""
    nonce = os.urandom(16).hex()
    send(connection, b"h", {"version": VERSION, "nonce": nonce if key else ""})
    if not key:
        return True
    _, reply, _ = receive(connection)
    if not hmac.compare_digest(str(reply.get("proof", "")), proof(key, nonce, "client")):
        send(connection, b"e", {"kind": "refused", "text": "the key is another one"})
        return False
    send(connection, b"h", {"proof": proof(key, str(reply.get("nonce", "")), "server")})
    return True


def serve(connection: socket.socket, memory_file: int = -1, recipe: Any = None, most: int = 0) -> None:
    """Answers until the other side goes. With ``recipe`` the world is fixed, and its user may only say how many, up to
    ``most``, and what is a success; experts are those of ``--expert``, and so a user chooses no code that runs here.
    Without ``memory_file`` memory travels with the messages."""
    host, given = None, 0
    while True:
        try:
            letter, header, data = receive(connection)
        except (EOFError, OSError, ValueError):
            for world in host.worlds if host else ():
                with contextlib.suppress(Exception):
                    world.close()
            return
        try:
            if letter == b"m":
                count = int(header["count"])
                if recipe is not None and not 1 <= count <= most:
                    raise ValueError(f"{count} worlds were asked for, and 1 to {most} are offered")
                host = host_of({**recipe, "success": header.get("success")} if recipe else header["recipe"], count)
                send(connection, b"k", host.describe())
                continue
            if host is None:
                raise ValueError("no world was made yet")
            if letter == b"a":
                given, size = sizes(host.layout, len(host.worlds))
                host.attach(bytearray(size) if memory_file < 0 else mmap.mmap(memory_file, size))
                send(connection, b"k", {})
                continue
            if memory_file < 0 and letter in b"rsx":
                host.memory[:given] = data
            reply, blob = host.answer(letter, header, data)
            send(connection, b"k", reply, host.memory[given:] if memory_file < 0 and letter in b"rsxp" else blob)
        except Exception as error:  # whatever an environment raises is told, and the worker goes on
            send(connection, b"e", {"kind": type(error).__name__, "text": str(error)[:2000]})


def main() -> None:
    """The program: the worlds of a Burnish process, or of any that connects to ``--listen``."""
    parser = argparse.ArgumentParser(description="Serve environments of Gymnasium to Burnish.")
    parser.add_argument("--socket", type=int, help="of Burnish: the inherited connection")
    parser.add_argument("--memory", type=int, help="of Burnish: the inherited memory")
    parser.add_argument("--listen", help="HOST:PORT of this machine; a HOST that others can reach needs " + KEY)
    parser.add_argument("--id", help="the environment: registered, an entry point, or module:callable")
    parser.add_argument("--package", dest="packages", action="append", default=[], help="imported first; repeatable")
    parser.add_argument("--expert", dest="experts", action="append", default=[], help="module:callable; repeatable")
    parser.add_argument("--vector", action="store_true", help="one environment of gymnasium.vector has all worlds")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="arguments of the environment, as JSON")
    parser.add_argument("--most", type=int, default=64, help="worlds that a user may ask for (default: %(default)s)")
    chosen = parser.parse_args()
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]  # its files are no packages of yours
    if chosen.socket is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for Burnish, which ends its workers itself
        with contextlib.suppress(OSError):  # its owner is gone
            serve(socket.socket(fileno=chosen.socket), chosen.memory)
        return
    if not chosen.listen or not chosen.id or not hasattr(os, "fork"):
        parser.error("give --listen HOST:PORT and --id ENVIRONMENT; on Windows it runs in WSL alone: it forks")
    name, _, port = chosen.listen.rpartition(":")
    key = os.environ.get(KEY, "")
    if not key and name not in ("127.0.0.1", "localhost", "::1"):
        parser.error(f"{name} can be reached by others: set {KEY} here and where Burnish runs, or listen on 127.0.0.1")
    recipe = {name: getattr(chosen, name) for name in ("id", "packages", "kwargs", "vector", "experts")}
    with socket.create_server((name, int(port))) as listener:
        sys.stderr.write(f"serving {chosen.id} on {name}:{listener.getsockname()[1]}\n")
        sys.stderr.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:  # each user has worlds of their own; the others need not wait
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.settimeout(10)
                    with contextlib.suppress(EOFError, OSError, ValueError):
                        if proven(connection, key):
                            connection.settimeout(None)
                            serve(connection, recipe=recipe, most=chosen.most)
                    return


if __name__ == "__main__":
    main()
