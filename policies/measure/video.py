"""Frames to mp4 (H.264, yuv420p), which every browser plays. A file appears under its name only when it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import BurnishError
from ..core.files import move, named, remove, vacant
from ..core.types import VecEnv
from ..core.wrapper import pictures


class Mp4Writer:
    """Encodes frame by frame, so that a long episode never lies in memory; ``save`` gives the file its name."""

    def __init__(self, path: Path | str, fps: float) -> None:
        # Imported here, so that an evaluation without videos does not load the codecs.
        import av

        if not 0 < fps < float("inf"):
            raise BurnishError(f"fps={fps} is no frame rate; give frames per second above 0")
        self.path = Path(path)
        self._partial = vacant(named(self.path.parent) / f".{self.path.name}.partial")
        self._container = av.open(str(self._partial), "w", format="mp4", options={"movflags": "faststart"})
        self._stream = self._container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = {"crf": "20", "preset": "veryfast"}
        self._shape: tuple[int, ...] | None = None

    def add(self, frame: np.ndarray) -> None:
        """``frame`` is (H, W, 3) uint8 RGB; all frames of a file have one size."""
        import av

        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise BurnishError(f"a video frame must be (H, W, 3) uint8, got {frame.shape} {frame.dtype}")
        # Chroma is stored for blocks of 2 x 2 pixels, so odd sizes repeat their last row or column.
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if self._shape is None:
            self._shape = frame.shape
            self._stream.height, self._stream.width = even.shape[:2]
        elif frame.shape != self._shape:
            raise BurnishError(f"a video of {self._shape} frames cannot take one of {frame.shape}")
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))

    def save(self, path: Path | str | None = None) -> Path:
        """Finish the file and move it to ``path`` (in the same folder; by default the path of the constructor)."""
        if self._shape is None:
            self.discard()
            raise BurnishError(f"the video {self.path} has no frames, so nothing was written")
        final = self.path if path is None else Path(path)
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return move(self._partial, final)

    def discard(self) -> None:
        self._container.close()
        remove(self._partial)


class Film:
    """Records chosen episodes of worlds that can ``render() -> (N, H, W, 3) uint8``, while they are played."""

    def __init__(self, env: VecEnv, folder: Path | str | None, chosen: Sequence[int], seeds: Sequence[int]) -> None:
        self._waiting = {int(s) for s in chosen}  # chosen seeds whose episode has not ended
        self._writers: dict[int, Mp4Writer] = {}
        self._folder, self._fps = Path(folder or "."), env.spec.control_hz
        self._env: Any = env
        if self._waiting and folder is None:
            raise BurnishError("video_seeds are given without a folder; name one with video=...")
        if unknown := sorted(self._waiting - set(seeds)):
            raise BurnishError(f"the video seeds {unknown} are not among the evaluated seeds; choose from these")
        if self._waiting and not hasattr(env, "render"):
            raise BurnishError(f"{type(env).__name__} has no render(), so it gives no videos; evaluate without video")

    def shoot(self, world_seeds: Sequence[int], mask: Tensor) -> None:
        """Append the present frame of every chosen episode that is played by a world of ``mask``."""
        if not self._waiting:
            return
        worlds = [i for i, m in enumerate(mask.tolist()) if m and world_seeds[i] in self._waiting]
        if not worlds:
            return
        frames = pictures(self._env, worlds).cpu().numpy()
        for world, frame in zip(worlds, frames, strict=True):
            seed = world_seeds[world]
            if seed not in self._writers:
                self._writers[seed] = Mp4Writer(self._folder / f"seed_{seed}.mp4", self._fps)
            self._writers[seed].add(frame)

    def cut(self, seed: int, success: bool | None) -> None:
        """Finish the file of an episode that has ended, and remove what an earlier evaluation called it."""
        if seed not in self._writers:
            return
        self._waiting.discard(seed)
        tail = {True: "_success", False: "_failure", None: ""}
        saved = self._writers.pop(seed).save(self._folder / f"seed_{seed}{tail[success]}.mp4")
        for name in (self._folder / f"seed_{seed}{t}.mp4" for t in tail.values()):
            if name != saved:
                remove(name)

    def drop(self, seed: int) -> None:
        """Throw away an episode that is played once more."""
        if seed in self._writers:
            self._writers.pop(seed).discard()

    def close(self) -> None:
        """Throw away what is unfinished, after an error."""
        for writer in self._writers.values():
            writer.discard()
