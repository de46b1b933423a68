"""Frames of a LeRobot video, each found by its time, in files that may be untrusted.

An mp4 may hold many episodes one after the other. PyAV decodes it (its wheels bring their own FFmpeg): from the last
key frame before the first time that is asked for, and no further than the last. The file is opened here and handed over
as it is, so that it can lead to no other file and no network; only mp4 with the codecs that LeRobot writes is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.errors import BurnishError, reason

CODECS = ("h264", "hevc", "av1", "vp9", "mpeg4")
TOLERANCE = 0.1  # of the time between two frames, by which a frame may be early or late


def decode(path: Path, times: Sequence[float], fps: float, shape: tuple[int, ...]) -> np.ndarray:
    """(F, C, H, W) uint8: the frames at ``times`` (s), which rise; ``shape`` is (C, H, W) with three colours."""
    import av
    import av.error

    frames, row, late = np.empty((len(times), *shape), np.uint8), 0, TOLERANCE / fps
    size = (shape[2], shape[1])
    try:
        with open(path, "rb") as file, av.open(file, format="mp4", mode="r") as container:
            if not container.streams.video:
                raise BurnishError("no video in it")
            stream = container.streams.video[0]
            if (codec := stream.codec_context.codec.canonical_name) not in CODECS:
                raise BurnishError(f"the codec {codec!r}; {', '.join(CODECS)} are read")
            if (stream.codec_context.width, stream.codec_context.height) != size:
                found = (stream.codec_context.width, stream.codec_context.height)
                raise BurnishError(f"{found} instead of {size} pixels")
            assert stream.time_base is not None
            container.seek(max(0, int(times[0] / stream.time_base)), stream=stream)
            for frame in container.decode(stream):
                if frame.pts is None or (frame.width, frame.height) != size:
                    raise BurnishError(f"a frame of {(frame.width, frame.height)} pixels, or without a time")
                at = float(frame.pts * stream.time_base)
                if at < times[row] - late:
                    continue
                if at > times[row] + late:
                    break
                frames[row] = frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
                row += 1
                if row == len(times):
                    return frames
    except (av.error.FFmpegError, OSError, OverflowError, ValueError) as error:
        if isinstance(error, BurnishError):
            raise
        raise BurnishError(f"no readable video ({reason(error)})") from error
    raise BurnishError(f"no frame at {times[row]:.4f} s")
