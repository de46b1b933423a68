"""Environments of Gymnasium, made and stepped for a Burnish process, in whichever Python has them.

One file that needs NumPy alone, for Python 3.8 and newer. Burnish starts it; elsewhere you do (see --help). A request
is a letter, a header in JSON and bytes, no pickle; so is an answer. Arrays lie in memory that both sides lay out alike
(`fields`), and share on one machine; else each sends the half that it wrote.

    m  make {"recipe", "count"}     -> what the environment is (`Host.describe`)     i  info -> its keys
    a  attach {}: the memory        e  only as an answer: the environment failed, and the worker goes on
    r  reset the worlds of `mask`, on `seeds`        s  step the worlds of `mask` by `action`
    p  play {"world", "seed"}: begin anew, and take the actions that follow     v  view {"world"} -> a picture
    t  take on {"expert"}: one beside each world     b  begin it     x  its action -> `advice`
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hmac
import importlib.metadata
import importlib.util
import json
import math
import mmap
import os
import random
import runpy
import signal
import socket
import struct
import sys
import traceback
from typing import Any

try:
    import numpy as np
except ImportError:
    sys.exit(f"{sys.executable} has no NumPy, which {__file__} needs; install it there: pip install numpy")
VERSION, GROUP, KEY = 2, "burnish.worlds", "BURNISH_API_KEY"  # the second of entry points
SUCCESS, UNREPORTED = ("success", "is_success"), 2  # the usual keys of an info; and where it says nothing
GENERATORS, WATCHED = ("_np_random", "rng"), 100  # of an environment; calls until it is taken to use no shared one
HEAD, HERE = struct.Struct("<cII"), os.path.dirname(os.path.abspath(__file__))  # letter, bytes of header and of data
LONGEST, UNPROVEN = (1 << 22, 1 << 30), (1 << 12, 0)  # bytes of a header, and after it; UNPROVEN from a peer


def load(name: str) -> Any:
    """The object ``module:attribute``; of a file, ``/path/of.py:attribute``."""
    module, _, attribute = name.rpartition(":")
    if module.endswith(".py"):
        return runpy.run_path(module)[attribute]
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


@functools.lru_cache
def installed(name: str) -> Any:
    """The entry point of that name; None where no installed package has it."""
    found: Any = importlib.metadata.entry_points()
    group = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())
    return next((entry.load() for entry in group if entry.name == name), None)


def make(recipe: dict[str, Any], count: int = 0) -> Any:
    """One environment: of a callable, of an entry point, or registered (module:Name-v0 too); of ``count`` a vector."""
    dice((np.random.RandomState(0).get_state(), random.Random(0).getstate()))  # as Meta-World's draw goals while made
    sys.path.extend(path for path in recipe.get("paths") or () if path not in sys.path)
    list(map(importlib.import_module, recipe.get("packages") or ()))
    name, kwargs = recipe["id"], {**(recipe.get("kwargs") or {}), **({"num_envs": count} if count else {})}
    if (made := load(name) if ":" in name and "-" not in name.rpartition(":")[2] else installed(name)) is not None:
        return made(**kwargs)
    if not importlib.util.find_spec("gymnasium"):
        return importlib.import_module("gym").make(name, **kwargs)
    gym = importlib.import_module("gymnasium")
    for package in recipe.get("guesses") or ():
        if name not in gym.registry and importlib.util.find_spec(package):
            importlib.import_module(package)
    kwargs.update({"max_episode_steps": x} if (x := recipe.get("max_steps")) else {})  # unchecked: we check each step
    return gym.make_vec(name, **kwargs) if count else gym.make(name, **{"disable_env_checker": True, **kwargs})


def leaves(space: Any, path: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The arrays of an observation space, each with the keys that lead to it, in the order of these keys."""
    if (inner := getattr(space, "spaces", None)) is not None:
        items = sorted(inner.items() if hasattr(inner, "items") else enumerate(inner), key=lambda item: str(item[0]))
        return [leaf for key, value in items for leaf in leaves(value, (*path, str(key)))]
    kind = type(space).__name__
    dtype, shape = (str(space.dtype), list(space.shape)) if kind == "Box" else ("uint8", [])  # refused by its kind
    return [{"path": list(path), "kind": kind, "dtype": dtype, "shape": shape}]


def as_array(value: Any) -> np.ndarray:
    """A value as a NumPy array, be it one already, a number or a tensor."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def read(obs: Any, path: list[str], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The array to which keys lead, as declared; refused where that changes a number, but fractions may get shorter."""
    value = as_array(functools.reduce(lambda x, key: x[int(key) if isinstance(x, (tuple, list)) else key], path, obs))
    found, kinds = value.astype(dtype, copy=False), value.dtype.kind + dtype.kind
    if value.shape != shape or (found is not value and kinds != "ff" and np.any(found != value)):
        raise ValueError(f"it declares {path} as {dtype} of shape {shape}, not {value.dtype} of shape {value.shape}")
    return found


def dice(new: Any) -> Any:
    """The states of the generators that NumPy and Python share among all, which are ``new`` from now on."""
    found = np.random.get_state(), random.getstate()
    np.random.set_state(new[0])
    random.setstate(new[1])
    return found


class Host:
    """Environments of one recipe, and the memory in which they and their user meet."""

    def __init__(self, recipe: dict[str, Any], worlds: list[Any]) -> None:
        self.recipe, self.worlds, world = recipe, worlds, worlds[0]
        self.leaves = leaves(getattr(world, "single_observation_space", world.observation_space))
        self.box = getattr(world, "single_action_space", world.action_space)
        self.dim = int(np.prod(getattr(self.box, "shape", None) or ()))
        self.layout, self.success = fields(self.leaves, self.dim), recipe.get("success")
        if len({name for name, *_ in self.layout}) < len(self.layout):
            raise ValueError("two parts of its observation have one name, since dots join keys; rename one of them")
        self.experts: list[Any] = []
        self.seen: list[Any] = [None] * len(worlds)  # the last observation and info of each world
        self.shared: list[Any] = [(None, WATCHED)] * len(worlds)  # generators of each, and calls that watch for its use

    def describe(self) -> dict[str, Any]:
        world, box, recipe = self.worlds[0], self.box, self.recipe
        inner, spec = getattr(world, "unwrapped", world), getattr(world, "spec", None)
        action = {"kind": type(box).__name__, "dtype": str(box.dtype or ""), "shape": list(box.shape or ())}
        if action["kind"] == "Box":
            action["low"], action["high"] = (x.ravel().astype(float).tolist() for x in (box.low, box.high))
        rates = {name: getattr(inner, name, None) for name in ("control_hz", "control_freq", "dt")}
        rates["render_fps"] = (getattr(world, "metadata", None) or {}).get("render_fps")
        found = {"version": VERSION, "id": recipe["id"], "observation": self.leaves, "action": action}
        found["rates"] = {k: as_array(x).item(0) for k, x in rates.items() if isinstance(x, (int, float, np.number))}
        found["max_steps"] = getattr(spec, "max_episode_steps", None) or getattr(world, "_max_episode_steps", None)
        found["says"] = {name: getattr(inner, name, None) for name in ("action_mode", "notes")}
        unsure = bool(getattr(spec, "nondeterministic", False) or recipe.get("vector"))
        return {**found, "nondeterministic": unsure, "render_mode": getattr(world, "render_mode", None)}

    def attach(self, memory: Any) -> None:
        self.memory, self.arrays = memory, arrays(memory, self.layout, len(self.worlds))
        self.rows = [self.arrays["obs." + ".".join(leaf["path"])] for leaf in self.leaves]

    def reset(self, i: int, seed: int) -> None:
        """On ``seed`` all that draws: its own generators, which robosuite seeds by nothing else, and those of all."""
        world = self.worlds[i]
        for source in map(vars(getattr(world, "unwrapped", world)).get, GENERATORS):
            if isinstance(source, np.random.Generator):  # others may hold the same one
                source.bit_generator.state = type(source.bit_generator)(seed).state
        self.shared[i] = (np.random.RandomState(seed).get_state(), random.Random(seed).getstate()), self.shared[i][1]
        found = self._alone(i, functools.partial(world.reset, seed=seed), always=True)
        self._see(i, *(found if isinstance(found, tuple) else (found, {})))

    def _alone(self, i: int, call: Any, *given: Any, always: bool = False) -> Any:
        """What ``call`` gives with the shared generators as world ``i`` left them; if it never draws, in a reset."""
        own, calls = self.shared[i]
        if calls <= 0 and not always:
            return call(*given)
        kept = dice(own)
        try:
            return call(*given)
        finally:
            states = own, dice(kept)
            one, other = ((n[1][0], *n[2:], p[1][0], p[1][-1], p[2]) for n, p in states)  # a draw changes one of these
            self.shared[i] = states[1], calls - 1 if one == other else np.inf

    def step(self, i: int, action: np.ndarray) -> None:
        """An old environment of four answers says by ``TimeLimit.truncated`` that it was cut off."""
        given = action.astype(self.box.dtype).reshape(self.box.shape)
        obs, reward, terminated, *rest, info = self._alone(i, self.worlds[i].step, given)
        cut = rest[0] if rest else info.get("TimeLimit.truncated", False)
        ended = bool(as_array(terminated).item(0)) and bool(rest or not cut)
        self._see(i, obs, info)
        self.arrays["reward"][i], self.arrays["terminated"][i] = as_array(reward).item(0), ended
        self.arrays["truncated"][i] = bool(as_array(cut).item(0)) and not ended
        self.arrays["success"][i] = self._succeeded(info or {}, ended)

    def _succeeded(self, info: dict[str, Any], ended: bool) -> int:
        info = {"terminated": ended} if self.success == "terminated" else info
        key = next((key for key in ((self.success,) if self.success else SUCCESS) if key in info), "")
        value = as_array(0 if info.get(key) is None else info[key])
        if value.size != 1 or value.item(0) not in (0, 1):
            raise ValueError(f"its info says {key}={info[key]!r}, which is not one truth value; see env.success")
        return int(value.item(0)) if key else UNREPORTED

    def _see(self, i: int, obs: Any, info: Any) -> None:
        self.seen[i] = (obs, info)
        for row, leaf in zip(self.rows, self.leaves):
            row[i] = read(obs, leaf["path"], row.dtype, row.shape[1:])

    def answer(self, letter: bytes, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if letter == b"t":
            if header["expert"] not in self.recipe.get("experts", [header["expert"]]):
                raise ValueError("this server does not offer that expert; start it with --expert NAME")
            self.experts = [load(header["expert"])(world) for world in self.worlds]
            for i in [i for i, seen in enumerate(self.seen) if seen is not None]:
                self._alone(i, self.experts[i].reset, *self.seen[i])
            still, levels = (getattr(self.experts[0], name, None) for name in ("still", "levels"))
            return {"levels": levels, "still": None if still is None else as_array(still).tolist()}, b""
        if letter == b"i":
            keys = {str(k) for seen in self.seen if seen for k, x in (seen[1] or {}).items() if np.isscalar(x)}
            return {"keys": sorted(keys)}, b""
        if letter == b"v":
            seen = self.worlds[(i := header["world"])].render()
            picture = np.ascontiguousarray(seen[i] if self.recipe.get("vector") else seen, np.uint8)
            return {"shape": list(picture.shape)}, picture.tobytes()
        if letter == b"p":
            i, played = header["world"], np.frombuffer(data, np.float64).reshape(-1, self.dim)
            self.reset(i, header["seed"])
            if self.experts:
                self._alone(i, self.experts[i].reset, *self.seen[i])
            for action in played:
                if self.experts:
                    self._alone(i, self.experts[i].act, *self.seen[i])  # it may remember what it has done
                self.step(i, action)
            return {}, b""
        for i in np.flatnonzero(self.arrays["mask"]).tolist():
            self.at = i
            if letter == b"r":
                self.reset(i, int(self.arrays["seeds"][i]))
            elif letter == b"s":
                self.step(i, self.arrays["action"][i])
            elif letter == b"x":
                self.arrays["advice"][i] = np.reshape(self._alone(i, self.experts[i].act, *self.seen[i]), self.dim)
            elif letter == b"b":
                self._alone(i, self.experts[i].reset, *self.seen[i])
            else:
                raise ValueError(f"there is no request {letter!r}")
        return {}, b""


def host_of(recipe: dict[str, Any], count: int) -> Host:
    """``count`` environments. `vector_worlds.py` and `old_gym.py`, beside this file, are run where they are such."""
    if recipe.get("vector"):
        beside = runpy.run_path(os.path.join(HERE, "vector_worlds.py"), {"server": sys.modules[__name__]})
        return beside["Batch"](recipe, [make(recipe, count)] * count)
    worlds = [make(recipe) for _ in range(count)]
    if "gym" in sys.modules and hasattr(worlds[0], "seed"):
        worlds = runpy.run_path(os.path.join(HERE, "old_gym.py"))["modern"](worlds, recipe.get("max_steps"))
    return Host(recipe, worlds)


def fields(observation: list[dict[str, Any]], dim: int) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Name, type, shape of a row, and whether it goes to the worlds; those that do stand first."""
    given = [("action", "float64", (dim,), True), ("seeds", "int64", (), True), ("mask", "uint8", (), True)]
    made = [("reward", "float64", (), False), ("advice", "float64", (dim,), False)]
    made += [(name, "uint8", (), False) for name in ("terminated", "truncated", "success")]
    return [*given, *made, *(("obs." + ".".join(x["path"]), x["dtype"], tuple(x["shape"]), False) for x in observation)]


def sizes(layout: list[tuple[str, str, tuple[int, ...], bool]], count: int) -> tuple[int, int]:
    """Bytes of the part that goes to the worlds, and of all."""
    room = [(-(-count * math.prod(shape) * np.dtype(kind).itemsize // 64), given) for _, kind, shape, given in layout]
    return 64 * sum(size for size, given in room if given), 64 * sum(size for size, _ in room)


def arrays(memory: Any, layout: list[tuple[str, str, tuple[int, ...], bool]], count: int) -> dict[str, np.ndarray]:
    """Views (count, ...) of the memory, each beginning at a multiple of 64 bytes."""
    found, start = {}, 0
    for name, dtype, shape, _ in layout:
        found[name] = np.ndarray((count, *shape), dtype, memory, start)
        start += -(-found[name].nbytes // 64) * 64
    return found


def send(connection: socket.socket, letter: bytes, header: dict[str, Any], data: Any = b"") -> None:
    """A message, sent: its letter, its header as JSON, and its bytes."""
    text = json.dumps(header, default=lambda _: None).encode() if header else b""  # an environment may say anything
    connection.sendall(b"".join((HEAD.pack(letter, len(text), len(data)), text, data)))


def receive(connection: socket.socket, most: tuple[int, int] = LONGEST) -> tuple[bytes, dict[str, Any], bytes]:
    """EOFError where the other side is gone; ValueError or RecursionError for what is no message."""
    letter, header, data = HEAD.unpack(exactly(connection, HEAD.size))
    if header > most[0] or data > most[1]:
        raise ValueError("a message is longer than any of ours")
    found = json.loads(exactly(connection, header) or b"{}")
    if not isinstance(found, dict):
        raise ValueError("the header of a message is no mapping")
    return letter, found, exactly(connection, data)


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes of a connection; EOFError where it ends before."""
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


def keep(connection: socket.socket) -> None:
    """Sends what is small at once, and notices within some minutes that the other side vanished without a word."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
    for name in options.keys() & vars(socket).keys():  # not every system has them all
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), options[name])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def proof(key: str, nonce: str, side: str) -> str:
    """The HMAC of side and nonce under ``key``, in hex."""
    return hmac.new(key.encode(), (side + nonce).encode(), "sha256").hexdigest()


def prove(connection: socket.socket, key: str) -> None:
    """The server's side: who holds the key proves it over a nonce, and so does the server. No key needs no proof."""
    nonce = os.urandom(16).hex()
    send(connection, b"h", {"version": VERSION, "nonce": nonce if key else ""})
    if not key:
        return
    _, reply, _ = receive(connection, UNPROVEN)
    if not hmac.compare_digest(str(reply.get("proof", "")).encode(), proof(key, nonce, "client").encode()):
        send(connection, b"e", {"kind": "refused", "text": "the key is another one"})
        raise ValueError("the key is another one")
    send(connection, b"h", {"proof": proof(key, str(reply.get("nonce", "")), "server")})


def serve(connection: socket.socket, memory_file: int = -1, recipe: Any = None, most: int = 0) -> None:
    """Answers until the other side goes. It chooses no code of a given ``recipe``, and has at most ``most`` worlds."""
    host, given, sent = None, 0, memory_file < 0
    while True:
        try:
            letter, header, data, reply, blob = *receive(connection), {}, b""
        except (EOFError, OSError, ValueError, RecursionError):
            for world in host.worlds if host else ():
                with contextlib.suppress(Exception):
                    world.close()
            return
        try:
            if letter == b"m":
                count, asked = int(header["count"]), {name: header.get(name) for name in ("success", "max_steps")}
                if recipe is not None and not 1 <= count <= most:
                    raise ValueError(f"{count} worlds were asked for, and 1 to {most} are offered")
                reply = (host := host_of({**recipe, **asked} if recipe else header["recipe"], count)).describe()
            elif host is None:
                raise ValueError("no world was made yet")
            elif letter == b"a":
                given, size = sizes(host.layout, len(host.worlds))
                host.attach(bytearray(size) if sent else mmap.mmap(memory_file, size))
            else:
                if sent and letter in b"rsxb":
                    host.memory[:given] = data
                reply, blob = host.answer(letter, header, data)
                blob = host.memory[given:] if sent and letter in b"rsxp" else blob
            send(connection, b"k", reply, blob)
        except Exception as error:  # whatever an environment raises is told, and the worker goes on
            found = {"kind": type(error).__name__, "text": str(error)[:2000], "world": getattr(host, "at", None)}
            lines = [frame[:2] for frame in traceback.extract_tb(error.__traceback__)[-50:]]
            send(connection, b"e", {**found, "lines": lines})


def main() -> None:
    """The program: the worlds of a Burnish process, or of any that connects to ``--listen``."""
    parser = argparse.ArgumentParser(description="Serve environments of Gymnasium to Burnish.")
    parser.add_argument("--inherited", type=int, nargs=2, help="of Burnish: the connection and the memory")
    parser.add_argument("--listen", help="HOST:PORT of this machine; a HOST that others can reach needs " + KEY)
    parser.add_argument("--id", help="the environment: registered, an entry point, or module:callable")
    parser.add_argument("--package", dest="packages", action="append", default=[], help="imported first; repeatable")
    parser.add_argument("--expert", dest="experts", action="append", default=[], help="module:callable; repeatable")
    parser.add_argument("--vector", action="store_true", help="one environment of gymnasium.vector has all worlds")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="arguments of the environment, as JSON")
    parser.add_argument("--most", type=int, default=64, help="worlds that a user may ask for (default: %(default)s)")
    chosen = parser.parse_args()
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]  # its files are no packages of yours
    if chosen.inherited is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for Burnish, which ends its workers itself
        with contextlib.suppress(OSError):  # its owner is gone
            serve(socket.socket(fileno=chosen.inherited[0]), chosen.inherited[1])
        return
    if not chosen.listen or not chosen.id or not hasattr(os, "fork") or not hasattr(signal, "alarm"):
        parser.error("give --listen HOST:PORT and --id ENVIRONMENT; on Windows it runs in WSL alone: it forks")
    key, (name, _, port) = os.environ.get(KEY, ""), chosen.listen.replace("[", "").replace("]", "").rpartition(":")
    if not key and name not in ("127.0.0.1", "localhost", "::1"):
        parser.error(f"{name} can be reached by others: set {KEY} here and where Burnish runs, or listen on 127.0.0.1")
    recipe = {name: getattr(chosen, name) for name in ("id", "packages", "kwargs", "vector", "experts")}
    try:
        listener = socket.create_server((name, int(port)), family=socket.AF_INET6 if ":" in name else socket.AF_INET)
    except (OSError, OverflowError, ValueError) as error:
        parser.error(f"--listen {chosen.listen} cannot be had ({error}); give HOST:PORT of this machine that is free")
    os.write(2, f"serving {chosen.id} on {name}:{listener.getsockname()[1]}\n".encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        with listener.accept()[0] as connection:
            if os.fork() == 0:  # each user has worlds of their own; the others need not wait
                listener.close()  # the port is free when the server has ended
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an environment may start processes
                keep(connection)
                signal.alarm(10)  # ends it, whatever came until then
                with contextlib.suppress(EOFError, OSError, ValueError, RecursionError):
                    prove(connection, key)
                    signal.alarm(0)
                    serve(connection, recipe=recipe, most=chosen.most)
                return


if __name__ == "__main__":
    main()
