"""A policy of LeRobot, which answers a Burnish process out of LeRobot's own Python.

It runs there with what LeRobot brings (NumPy, torch, safetensors), and imports nothing of ours. Burnish starts it as
``lerobot_server.py SOCKET PARENT``; ``lerobot_server.py probe`` says which policies this Python has. A message is JSON
and then arrays as safetensors, which `side_process.py` writes and reads in the same way. The first request is

    {"folder", "device", "threads"}  ->  what the policy sees and answers (`Host.describe`), and its ``extensions``

and all others are those of a policy server (`policies/wire`): ``batch`` rows of everything, under the names of
LeRobot, pictures as (B, H, W, 3) uint8, in a history (B, n, ...); perhaps ``noise``, ``seed`` and ``prompt``. The reply
holds ``actions`` (B, T, A) in units of the actuators, or ``error``.

Nothing is remembered: with each request come the observations on which its answer depends. ``noise`` is taken where two
noises give two answers (LeRobot has policies that accept one and ignore it), and ``seed`` where the policy draws by
itself: then a row is drawn from its seed, in whatever company it is.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import safetensors.numpy
import torch

VERSION = 1
IMAGES, IMAGE = "observation.images", "observation.image"  # where LeRobot's queues keep pictures, of all or one camera
LONGEST = 1 << 30  # bytes of a part of a message


def send(connection: Connection, message: dict[str, Any]) -> None:
    """A message, sent in two parts: what is plain, and its arrays."""
    arrays = {key: np.ascontiguousarray(x) for key, x in message.items() if isinstance(x, np.ndarray)}
    connection.send_bytes(json.dumps({key: x for key, x in message.items() if key not in arrays}).encode())
    connection.send_bytes(safetensors.numpy.save(arrays))


def receive(connection: Connection) -> dict[str, Any]:
    """EOFError where the other side is gone; ValueError for what is no message."""
    message = json.loads(connection.recv_bytes(LONGEST))
    if not isinstance(message, dict):
        raise ValueError("a message is no mapping")
    try:
        return {**message, **safetensors.numpy.load(connection.recv_bytes(LONGEST))}
    except safetensors.SafetensorError as error:
        raise ValueError(f"the arrays of a message are malformed: {error}") from error


class Host:
    """A policy of LeRobot with its processors, and the facts that a trial shows of it."""

    def __init__(self, folder: str, device: str) -> None:
        from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # pyright: ignore[reportMissingImports]

        config = configuration(folder)
        config.device = device
        for name, value in (("pretrained_backbone_weights", None), ("compile_model", False)):
            if hasattr(config, name):  # the weights are here, and a compiler may not be
                setattr(config, name, value)
        self.config, self.device = config, torch.device(device)
        self.policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
        placed = {"device_processor": {"device": device}} if _has_step(folder, "device_processor") else {}
        self.before, self.behind = make_pre_post_processors(config, folder, preprocessor_overrides=placed)
        queues = getattr(self.policy, "_queues", None) or {}
        self._queued = [name for name in queues if name.startswith("observation")]
        self.history = config.n_obs_steps if self._queued else 1
        self.pictures = [name for name, x in config.input_features.items() if x.type.name == "VISUAL"]
        self._learn()

    def describe(self) -> dict[str, Any]:
        config, steps = self.config, getattr(self.config, "n_action_steps", None) or self.horizon
        given = {name: {"type": x.type.name, "shape": list(x.shape)} for name, x in config.input_features.items()}
        said = {"noise": self.noise is not None, "seed": self.draws}
        return {
            "version": VERSION,
            "type": config.type,
            "input_features": given,
            "history": self.history,
            "chunk": [self.horizon, self.dim],
            "execute": min(self.horizon, steps * getattr(config, "n_action_repeats", 1)),
            "noise": self.noise,
            "extensions": ["batch", *(name for name, there in said.items() if there)],
        }

    def answer(self, request: dict[str, Any]) -> np.ndarray:
        """(B, T, A)"""
        rows = request["batch"]
        obs = {name: self._seen(name, request[name]) for name in self.config.input_features if name in request}
        noise = torch.from_numpy(request["noise"]).to(self.device) if "noise" in request else None
        seeds = request["seed"].tolist() if "seed" in request else [0] * rows
        parts = [slice(i, i + 1) for i in range(rows)] if self.draws and self._scheduler() is None else [slice(rows)]
        said = request.get("prompt")
        task = None if said is None else [said] * rows if isinstance(said, str) else list(said)
        chunks = []
        for part in parts:
            some = {name: x[part] for name, x in obs.items()}
            given = {} if noise is None else {"noise": noise[part]}
            chunks.append(self._chunk(some, task and task[part], seeds[part], **given))
        return torch.cat(chunks).numpy()

    def _seen(self, name: str, x: np.ndarray) -> torch.Tensor:
        """As LeRobot's own environments show it: pictures (..., 3, H, W) in [0, 1]."""
        seen = torch.from_numpy(x).to(self.device)
        return seen.movedim(-1, -3).float() / 255 if name in self.pictures else seen.float()

    def _chunk(self, obs: dict[str, torch.Tensor], task: Any, seeds: list[int], **given: torch.Tensor) -> torch.Tensor:
        amp = torch.autocast(self.device.type) if self.config.use_amp else contextlib.nullcontext()
        with torch.no_grad(), amp, self._drawing(seeds):
            self.policy.reset()
            batch: dict[str, Any] = {}
            for k in range(self.history):
                frame = {name: x[:, k] if x.ndim > self._rank(name) else x for name, x in obs.items()}
                batch = self.before({**frame, **({} if task is None else {"task": task})})
                batch.pop("action", None)  # an empty place for one, which has a queue too
                self._remember(batch)
            try:
                actions = self.policy.predict_action_chunk(batch, **given)
            except NotImplementedError:  # of a policy without chunks
                actions = self.policy.select_action(batch, **given)[:, None]
        if self.config.type == "tdmpc":  # time first; and it repeats the first action where its settings say so
            actions, repeats = actions.transpose(0, 1), self.config.n_action_repeats
            actions = actions[:, :1].expand(-1, repeats, -1) if repeats > 1 else actions
        return self.behind(actions).float().cpu()

    def _rank(self, name: str) -> int:
        return 1 + len(self.config.input_features[name].shape)

    def _remember(self, batch: dict[str, Any]) -> None:
        """One frame into the queues of the policy, from which its chunk is predicted; the first one fills them."""
        if IMAGES in self._queued:
            batch[IMAGES] = torch.stack([batch[name] for name in self.pictures], dim=-4)
        elif IMAGE in self._queued:
            batch[IMAGE] = batch[self.pictures[0]]
        for name in self._queued:
            if name in batch:
                queue = self.policy._queues[name]
                queue.extend([batch[name]] * (1 if len(queue) == queue.maxlen else queue.maxlen))

    # ---- Noise and draws ----

    def _scheduler(self) -> Any:
        """Of a diffusion policy: it draws a new noise for each row and step, from a generator for each row."""
        return getattr(getattr(self.policy, "diffusion", None), "noise_scheduler", None)

    @contextlib.contextmanager
    def _drawing(self, seeds: list[int]) -> Iterator[None]:
        """The policy's own draws come from a seed for each row meanwhile; of other policies there is one row."""
        torch.manual_seed(seeds[0])
        if (scheduler := self._scheduler()) is None:
            yield
            return
        step, sources = scheduler.step, [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        scheduler.step = lambda *args, **named: step(*args, **{**named, "generator": sources})
        try:
            yield
        finally:
            del scheduler.step

    def _learn(self) -> None:
        """The size of a chunk, whether the policy takes noise, and whether it draws, by trying."""
        config = self.config
        blank = {name: torch.zeros(1, *x.shape, device=self.device) for name, x in config.input_features.items()}

        def tried(seed: int, **given: torch.Tensor) -> torch.Tensor:
            return self._chunk(blank, [""], [seed], **given)

        first = tried(0)
        self.horizon, self.dim = first.shape[1:]
        taken = inspect.signature(self.policy.predict_action_chunk).parameters
        self.noise: list[int] | None = None
        given: dict[str, torch.Tensor] = {}
        if "noise" in taken or any(x.kind is x.VAR_KEYWORD for x in taken.values()):
            length = getattr(config, "horizon", None) or getattr(config, "chunk_size", None) or self.horizon
            shape = [length, getattr(config, "max_action_dim", None) or self.dim]
            one, other = torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(0)).to(self.device)
            with contextlib.suppress(TypeError):  # it takes other arguments, and not this one
                if _differ(tried(0, noise=one), tried(0, noise=other)):
                    self.noise, given = shape, {"noise": one}
        self.draws = _differ(tried(0, **given), tried(1, **given))


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By more than rounding, which a GPU does not repeat."""
    return bool((one - other).abs().max() > 1e-3 * one.abs().max())


def configuration(folder: str) -> Any:
    """The settings in a folder. Of packages that bring further types only those are imported that are installed as
    LeRobot's plug-ins; a file can name none."""
    import lerobot.policies  # pyright: ignore[reportMissingImports] # registers the types
    import lerobot.policies.factory  # noqa: F401  # pyright: ignore[reportMissingImports]
    from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]

    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        kind = json.load(file)["type"]
    if kind not in PreTrainedConfig.get_known_choices():
        from lerobot.utils.import_utils import register_third_party_plugins  # pyright: ignore[reportMissingImports]

        register_third_party_plugins()
    known = sorted(PreTrainedConfig.get_known_choices())
    if kind not in known:
        raise ValueError(f"this LeRobot knows no policy {kind!r}, but {', '.join(known)}; install what brings it")
    return PreTrainedConfig.from_pretrained(folder)


def _has_step(folder: str, name: str) -> bool:
    with open(os.path.join(folder, "policy_preprocessor.json"), encoding="utf-8") as file:
        return any(step.get("registry_name") == name for step in json.load(file)["steps"])


def prepare() -> None:
    """LeRobot made importable, and unable to run what a checkpoint brings."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]  # its files are no packages of theirs
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        pass
    except RuntimeError:  # its operators, for detection, are built for another torch; networks and transforms need none
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
    with contextlib.suppress(ImportError):
        from transformers import dynamic_module_utils  # pyright: ignore[reportMissingImports]

        dynamic_module_utils.get_class_in_module = _refuse


def _refuse(*args: Any, **named: Any) -> None:
    raise ValueError("a tokenizer or a model of this policy is code out of a checkpoint or the hub, which is not run")


def serve(connection: Connection) -> None:
    """Answers until the other side goes."""
    host = None
    while True:
        try:
            request = receive(connection)
        except (EOFError, OSError, ValueError):
            return
        try:
            if host is None:
                if request["threads"]:
                    torch.set_num_threads(request["threads"])
                host = Host(request["folder"], request["device"])
                reply = host.describe()
            else:
                reply = {"actions": host.answer(request)}
        except Exception as error:  # whatever LeRobot raises is told
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        send(connection, reply)


def _watch(parent: int) -> None:
    """A process whose parent is gone ends, also in the middle of an answer."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def probe() -> str:
    """The policies that can be imported here."""
    import lerobot
    from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
    from lerobot.policies.factory import get_policy_class  # pyright: ignore[reportMissingImports]

    usable = []
    for name in sorted(PreTrainedConfig.get_known_choices()):
        with contextlib.suppress(Exception):  # each has demands of its own
            usable.append(get_policy_class(name).name)
    if "act" not in usable or "diffusion" not in usable:
        raise ImportError(f"LeRobot's own policies cannot be imported, only {usable}")
    return f"LeRobot {getattr(lerobot, '__version__', '')} with torch {torch.__version__} plays {', '.join(usable)}"


def main() -> None:
    """The program: a trial of this Python, or the policy of a Burnish process."""
    prepare()
    if sys.argv[1] == "probe":
        sys.stdout.write(probe() + "\n")
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for Burnish, which ends this process itself
    threading.Thread(target=_watch, args=(int(sys.argv[2]),), daemon=True).start()
    with contextlib.suppress(OSError):  # its owner is gone
        serve(Connection(int(sys.argv[1])))
    os._exit(0)  # at once, without what libraries tidy up


if __name__ == "__main__":
    main()
