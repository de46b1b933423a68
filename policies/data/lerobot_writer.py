"""Episodes -> a LeRobotDataset v3.0 folder, with pyarrow and json alone.

With ``publish_every_s`` the set grows in public: a complete and valid set of the episodes so far stands at the target
at any instant, whatever happens to the writer. Without, it appears at the end or never. Either way the bytes depend on
the episodes alone: a set of k episodes is the same file for file whether it was written at once, published in between,
or taken up again (``resume``) after a kill.

**Departures.** LeRobot stores T observations per episode and only ``next.done``. We add ``next.terminated`` and
``next.truncated``, keep the final observation and the seed in ``meta/final_obs.parquet`` and the simulator's state in
``sim_state/``; LeRobot passes over both. ``timestamp`` and ``fps`` are LeRobot's (an integer); the exact control rate
stands in our entry of ``info.json``. Further columns that an episode brings (``extra``) are features beside
``action``, with statistics; our entry names them, so that they are read back as what they were.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ..core.errors import BurnishError
from ..core.files import named, write_new
from ..core.spec import EnvSpec, Names
from . import lerobot_layout as layout
from . import lerobot_progress as progress
from . import lerobot_sim_state as sim_state
from . import lerobot_tables as tables
from .episodes import Episode, Episodes, check_fits
from .growing_folder import GrowingFolder

MEGABYTE = 2**20
# The time between two publications is at least this many times what the last one took: the statistics of a large set
# cost seconds, and recording must not wait for them more than a twentieth of the time.
PATIENCE = 20


class LeRobotWriter:
    """``with LeRobotWriter(path, spec, meta) as writer: writer.add(episode)``.

    ``resume`` continues the set at ``path`` if there is one, which the same configuration must have written. ``extra``
    says which further columns every episode brings, and of what kind: an ``Episode.extra``, though it have no rows.
    ``names`` are those of the numbers of observations and actions, where they have any.
    """

    def __init__(
        self,
        path: str | Path,
        spec: EnvSpec,
        meta: Mapping[str, Any] | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        names: Names | None = None,
        fps: int | None = None,
        robot_type: str | None = None,
        data_files_size_in_mb: int = 100,
        publish_every_s: float | None = None,
        resume: bool = False,
    ) -> None:
        self.path, self.spec = Path(path).absolute(), spec
        self._fps = fps if fps is not None else max(1, round(spec.control_hz))
        if self._fps < 1 or data_files_size_in_mb < 1:
            raise BurnishError("fps and data_files_size_in_mb must be at least 1")
        self._extra = layout.extra_features(extra or {})
        self._features = layout.features_of(spec, extra or {}, names)
        try:
            entry = json.loads(json.dumps(layout.burnish_entry(spec, meta or {}, self._extra), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BurnishError(
                f"the dataset's meta and action limits must be finite plain JSON data: {error}"
            ) from error
        self._info = {"robot_type": robot_type, "data_files_size_in_mb": data_files_size_in_mb, "burnish": entry}
        self._limit = data_files_size_in_mb * MEGABYTE
        self._publish_every_s = math.inf if publish_every_s is None else publish_every_s
        self._due_s = -math.inf if publish_every_s is not None else math.inf  # on the clock of time.monotonic
        self._folder = GrowingFolder(self.path, resume=resume)
        self._unpublished = 0
        # The set at the target is read in full only once there is something to add to it.
        self._progress: progress.Progress | None = None
        self.seeds: list[int] = []  # of the episodes so far
        self.notes: list[str] = []  # on them, kept in ``meta`` from the next publication on
        if not self._folder.published:
            self._progress = progress.begun(self._features)
            return
        try:
            expected = {**self._info, "fps": self._fps, "features": self._features}
            self.seeds = progress.recorded_seeds(self._folder.target, expected)
        except BaseException:
            self._folder.close()
            raise

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def add(self, episode: Episode) -> None:
        """The next episode. Its rows are in the next publication, which this may bring about."""
        so_far, number = self._so_far(), len(self.seeds)
        check_fits(episode, self.spec, number)
        if (found := layout.extra_features(episode.extra)) != self._extra:
            raise BurnishError(
                f"episode {number} has the further columns {_kinds(found)}, but this set {_kinds(self._extra)}; "
                "all episodes of a set must have the same"
            )
        states = self._states(episode, number)
        task_index = so_far.tasks.setdefault(episode.task, len(so_far.tasks))
        place = tables.Place(number, so_far.frames, task_index, self._fps)
        made = tables.tables_of(episode, place, self._features)
        if so_far.open.data and so_far.open.size + progress.size_of(made.data, states) > self._limit:
            so_far.open.write(self._folder.finished)
            so_far.open = progress.OpenFile(so_far.open.number + 1)
        so_far.open.add(made.data, states)
        so_far.rows.add(tables.episode_row(episode, place, so_far.open.number, made))
        so_far.finals.add(made.final)
        so_far.tally.add(made.vectors, made.histograms)
        so_far.frames += len(episode)
        self.seeds.append(episode.seed)
        self._unpublished += 1
        self.publish_if_due()

    def publish_if_due(self) -> None:
        """To be called now and then while no episode comes, so that the last ones do not wait for the next."""
        if self._unpublished and time.monotonic() >= self._due_s:
            self.publish()

    def publish(self) -> None:
        """Let the set at the target be that of all episodes so far."""
        began_s = time.monotonic()
        self._folder.publish(self._write)
        self._unpublished = 0
        now_s = time.monotonic()
        self._due_s = now_s + max(self._publish_every_s, PATIENCE * (now_s - began_s))

    def finish(self) -> Path:
        """Publish what is not yet, and leave nothing else behind."""
        if not self.seeds:
            self.abort()
            raise BurnishError(f"no episodes were added, so no dataset was written at {self.path}")
        try:
            if self._unpublished:
                self.publish()
        finally:
            self._folder.close()
        return self.path

    def abort(self) -> None:
        """Leave the target at the last publication."""
        self._folder.close()

    def totals(self) -> dict[str, int]:
        """Of the episodes so far: how many, their frames, how many succeeded."""
        so_far = self._so_far()
        successes = so_far.rows.table()["stats/next.success/max"].to_pylist() if self.seeds else []
        return {
            "episodes": len(self.seeds),
            "frames": so_far.frames,
            "successes": sum(bool(most) for (most,) in successes),
        }

    def _so_far(self) -> progress.Progress:
        if self._progress is None:
            self._progress = progress.taken_up(self._folder.target, self._features)
        return self._progress

    def _states(self, episode: Episode, number: int) -> pa.Table | None:
        """The first episode decides whether states are kept, and of what kind."""
        so_far = self._so_far()
        found = sim_state.described(episode.sim_state) if episode.sim_state else None
        if number == 0:
            so_far.sim_state = found
        if found != so_far.sim_state:
            raise BurnishError(
                f"episode {number} has other simulator states than the episodes before it; "
                "all episodes of a set must have the same, or none"
            )
        return sim_state.packed(episode.sim_state, number) if episode.sim_state else None

    def _write(self, root: Path) -> None:
        """All files of the set but the full data files, into an empty folder."""
        so_far = self._so_far()
        so_far.open.write(root)
        found = so_far.tally.total()
        stats = {name: {stat: x.tolist() for stat, x in found[name].items()} for name in self._features}
        entry = self._info["burnish"] | ({"sim_state": so_far.sim_state} if so_far.sim_state else {})
        if self.notes:
            entry = entry | {"meta": {**entry["meta"], "notes": self.notes}}
        info = {
            "codebase_version": layout.VERSION,
            "total_episodes": len(self.seeds),
            "total_frames": so_far.frames,
            "total_tasks": len(so_far.tasks),
            "chunks_size": layout.CHUNKS_SIZE,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self.seeds)}"},
            "data_path": layout.DATA_PATH,
            "video_path": None,
            "features": self._features,
            **self._info,
            "burnish": entry,
        }
        files = {
            layout.EPISODES_PATH: so_far.rows.table(),
            layout.TASKS_PATH: tables.task_table(list(so_far.tasks)),
            layout.FINAL_OBS_PATH: so_far.finals.table(),
        }
        named((root / layout.EPISODES_PATH).parent)
        for name, table in files.items():
            pq.write_table(table, root / name, write_page_checksum=True)
        for name, data in ((progress.INFO_PATH, info), (progress.STATS_PATH, stats)):
            write_new(root / name, json.dumps(data, indent=2, allow_nan=False))


def _kinds(features: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} ({x['dtype']}, {x['shape'][0]})" for name, x in features.items()) or "none"


def write_lerobot(
    episodes: Episodes,
    path: str | Path,
    *,
    fps: int | None = None,
    robot_type: str | None = None,
    data_files_size_in_mb: int = 100,
) -> Path:
    """The whole set or nothing. ``fps`` is the control rate, rounded, unless given."""
    with LeRobotWriter(
        path,
        episodes.spec,
        episodes.meta,
        extra=episodes[0].extra if len(episodes) > 0 else None,
        names=episodes.names,
        fps=fps,
        robot_type=robot_type,
        data_files_size_in_mb=data_files_size_in_mb,
    ) as writer:
        for episode in episodes:
            writer.add(episode)
    return writer.path
