"""LeRobot sets as older versions and default settings write them: v2.1, and videos. Pixels say where they are from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS, SIZE = 10, (48, 64)  # of every video: frames per second; height, width
CAMERA = "observation.images.top"
OLD = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
NEW = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


def tree(root: Path) -> dict[str, str]:
    """The hash of every file, by its path."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def colour(episode, frame):
    """Three levels, far enough apart to survive a lossy codec."""
    return np.array([40 + 50 * (episode % 4), 30 + 8 * frame, 200 - 12 * frame], np.uint8)


def encode(path, frames, codec="h264", size=SIZE, pixels="yuv420p", **options):
    """``frames`` is a list of (episode, frame)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream(codec, rate=FPS, options=options or {"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = *size, pixels
        for episode, frame in frames:
            picture = np.broadcast_to(colour(episode, frame), (*size, 3)).copy()
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    if hasattr(os, "sched_setscheduler"):  # as root, SVT-AV1 makes whoever encodes the first in line for every core
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def rows(episode, length, first):
    frame = np.arange(length)
    return pa.table(
        {
            "observation.state": pa.FixedSizeListArray.from_arrays(
                pa.array(np.stack([frame + 100.0 * episode, frame], 1).astype(np.float32).ravel()), 2
            ),
            "action": pa.FixedSizeListArray.from_arrays(
                pa.array(np.stack([frame, -frame], 1).astype(np.float32).ravel()), 2
            ),
            "timestamp": pa.array((frame / FPS).astype(np.float32)),
            "frame_index": frame,
            "episode_index": np.full(length, episode),
            "index": first + frame,
            "task_index": np.zeros(length, np.int64),
        }
    )


def info(version, lengths, templates):
    def feature(kind, shape):
        return {"dtype": kind, "shape": shape, "names": None}

    features = {"observation.state": feature("float32", [2]), "action": feature("float32", [2])}
    features[CAMERA] = feature("video", [*SIZE, 3])
    features |= {name: feature("int64", [1]) for name in ("frame_index", "episode_index", "index", "task_index")}
    features["timestamp"] = feature("float32", [1])
    counts = {"total_episodes": len(lengths), "total_frames": sum(lengths), "chunks_size": 1000}
    return {"codebase_version": version, "fps": FPS, "robot_type": "so101", "features": features, **counts, **templates}


def write(root, version, lengths=(5, 7, 6), *, per_file=2, **video):
    """A set of that version; since v3.0 ``per_file`` episodes share a video, whose frames follow one another."""
    root = Path(root)
    (root / "meta").mkdir(parents=True)
    old = version != "v3.0"
    described = info(version, lengths, OLD if old else NEW)
    (root / "meta/info.json").write_text(json.dumps(described))
    tables = [rows(i, n, sum(lengths[:i])) for i, n in enumerate(lengths)]
    frames = [[(i, k) for k in range(n)] for i, n in enumerate(lengths)]
    if old:
        for i, table in enumerate(tables):
            path = root / OLD["data_path"].format(episode_chunk=0, episode_index=i)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)
            encode(
                root / OLD["video_path"].format(episode_chunk=0, episode_index=i, video_key=CAMERA), frames[i], **video
            )
        lines = [{"episode_index": i, "tasks": ["push"], "length": n} for i, n in enumerate(lengths)]
        (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "push"}) + "\n")
        return root
    (root / "data/chunk-000").mkdir(parents=True)
    pq.write_table(pa.concat_tables(tables), root / "data/chunk-000/file-000.parquet")
    listed = []
    for begin in range(0, len(lengths), per_file):
        part = range(begin, min(begin + per_file, len(lengths)))
        file = begin // per_file
        joined = [pair for i in part for pair in frames[i]]
        encode(root / NEW["video_path"].format(chunk_index=0, file_index=file, video_key=CAMERA), joined, **video)
        for i in part:
            place = {"chunk_index": 0, "file_index": file, "from_timestamp": sum(lengths[begin:i]) / FPS}
            listed.append(
                {
                    "episode_index": i,
                    "length": lengths[i],
                    "data/chunk_index": 0,
                    "data/file_index": 0,
                    **{f"videos/{CAMERA}/{name}": x for name, x in place.items()},
                }
            )
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(listed), root / "meta/episodes/chunk-000/file-000.parquet")
    return root
