"""The windows of recorded episodes that imitation learns from."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.prefetch import sent, without_room
from ..core.ranks import ALONE, Ranks
from ..core.spec import PolicySpec, is_image, stacked_by_history
from ..core.types import Obs
from .episodes import Episodes, scaled_actions, with_tokens
from .on_disk import rows_in_file


class Pad(enum.Enum):
    """Fills a chunk where its episode has no action. Names are lower case: configuration reads them by name."""

    repeat = "repeat"  # the nearest action: stands still in position modes
    zero = "zero"  # the centre of the actuator range: stands still in delta and velocity modes


class Batch(NamedTuple):
    """A batch of B windows of imitation: observations, the H actions that follow, and the mask of real ones."""

    obs: Obs  # sensed keys (B, ...), or (B, history, ...) where history > 1
    action: Tensor  # (B, H, A) in [-1, 1]
    mask: Tensor  # (B, H) bool, False where the action is padding


class Windows:
    """All windows of all episodes, gathered by index arithmetic from columns that are concatenated once.

    A window stands at a time t = 0 .. T-1 of an episode; with history = 2, horizon = 5, start = 1, T = 4, t = 2:

        time               -1    0    1    2    3    4    5
        observation              s0   s1   s2   s3  (s4: final, never "now", so it is not even stored here)
        history                       s1   s2          t - history + 1 .. t; before 0 the first frame is repeated
        action                   a0   a1   a2   a3
        chunk position j               0    1    2    3    4         holds the action of time t - start + j
        chunk                         a1   a2   a3   a3   a3         Pad.repeat; Pad.zero has 0 for the last two
        mask                           1    1    1    0    0

    Before time 0 a chunk repeats a0 (or is zero), masked as well. ``columns`` (F, ...) are the raw observations and
    ``action`` (F, A) the scaled actions of all F frames: what normalisers are fitted on. Pictures that are kept on the
    disk stay there, and are read when they are drawn. Where episodes are shared out (``shared``), ``columns`` hold the
    pictures of this rank's own alone.
    """

    def __init__(
        self, episodes: Episodes, policy: PolicySpec, pad: Pad | str = Pad.repeat, ranks: Ranks = ALONE
    ) -> None:
        if len(episodes) == 0:
            raise BurnishError("windows need at least one episode")
        episodes = with_tokens(episodes, policy)
        missing = sorted(set(policy.obs.shapes) - set(episodes.spec.obs.shapes))
        if missing:
            raise BurnishError(
                f"the policy needs the observations {missing}, but the data has {sorted(episodes.spec.obs.shapes)}"
            )
        self.horizon, self.start, self.history, self.pad = policy.horizon, policy.start, policy.history, Pad(pad)
        lengths = torch.tensor([len(episode) for episode in episodes])
        ends = lengths.cumsum(0)
        policy.obs.check({key: episodes[0].obs[key] for key in policy.obs.shapes})  # all of a set are alike
        self._keys = list(policy.obs.shapes)
        shown = [episode for episode in episodes if not episode.elsewhere]
        parts = {key: [x.obs[key][:-1] for x in (shown if is_image(key) else episodes)] for key in self._keys}
        self._on_disk = {key: found for key, x in parts.items() if (found := rows_in_file(x)) is not None}
        self.columns: Obs = {key: torch.cat(x) for key, x in parts.items() if key not in self._on_disk}
        self.action = scaled_actions(episodes, policy.action)
        # First and last frame of the episode to which each frame belongs.
        device = self.action.device
        self._first = (ends - lengths).repeat_interleave(lengths).to(device)
        self._last = (ends - 1).repeat_interleave(lengths).to(device)
        self.ranks, self.shared = ranks, len(shown) < len(episodes)
        if self.shared:
            # Of a frame: the rank that has its pictures, and, on that rank, its place among them.
            self._owner = (torch.arange(len(lengths)) % ranks.size).repeat_interleave(lengths)
            self._place = ((self._owner == ranks.rank).cumsum(0) - 1).to(device)
        self._chunk = torch.arange(self.horizon, device=device) - self.start
        self._past = torch.arange(1 - self.history, 1, device=device)

    def __len__(self) -> int:
        return len(self.action)

    @property
    def device(self) -> torch.device:
        return self.action.device

    def __getitem__(self, index: Tensor) -> Batch:
        """The windows of numbers ``index`` (B,) int64; windows are numbered episode by episode, in time order."""
        return self._batch(index, self._frames)

    def _batch(self, index: Tensor, pictures: Callable[[str, Tensor], Tensor]) -> Batch:
        now = index.to(self.device)
        first, last = self._first[now, None], self._last[now, None]
        wanted = now[:, None] + self._chunk
        held = wanted.clamp(first, last)
        mask = wanted == held
        action = _gather(self.action, held)
        if self.pad is Pad.zero:
            action = action.masked_fill(~mask[..., None], 0.0)
        read = {key: pictures if is_image(key) else self._frames for key in self._keys}
        return Batch({key: frames(key, self._seen(key, now)) for key, frames in read.items()}, action, mask)

    def share(self, index: Tensor) -> Batch:
        """The rows of a batch, of windows ``index`` (B,), that are this rank's. All ranks ask for the same batch, and
        those that have pictures of it send them."""
        return self._batch(self.ranks.rows(index), lambda key, _: self._sent(key, index))

    def _sent(self, key: str, index: Tensor) -> Tensor:
        owner = self._owner[index]
        held = index[owner == self.ranks.rank].to(self.device)
        return self.ranks.delivered(self._frames(key, self._seen(key, held)), owner)

    def _seen(self, key: str, now: Tensor) -> Tensor:
        """The frames of an observation: that of each window, or (B, history)."""
        if self.history == 1 or not stacked_by_history(key):
            return now
        return (now[:, None] + self._past).clamp(min=self._first[now, None])

    def _frames(self, key: str, index: Tensor) -> Tensor:
        if self.shared and is_image(key):
            index = self._place[index]
        if key in self.columns:
            stored = self.columns[key]
            return sent(_gather(stored, index.to(stored.device)), self.device)
        file, rows = self._on_disk[key]
        return sent(_gather(file, rows[index.to(rows.device)]), self.device)

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        """``batch`` windows, uniformly and with replacement: the generator's state is all that a resume needs."""
        return self[self.draw(batch, generator)]

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """The numbers of these windows."""
        return torch.randint(len(self), (batch,), generator=generator, device=generator.device)

    @property
    def away(self) -> bool:
        """Whether a batch comes from another memory than that of the learner, or from a file."""
        return bool(self._on_disk) or any(x.device.type != self.device.type for x in self.columns.values())

    def to(self, device: torch.device | str) -> Windows:
        """The same windows on another device; a CPU generator draws the same numbers for both. Host memory keeps
        what a GPU has no room for."""
        moved, to = copy.copy(self), torch.device(device)
        sizes = {key: x.nbytes for key, x in self.columns.items()}
        stays = without_room(sizes, to) if to.type == "cuda" else set()
        moved.columns = {key: x if key in stays else x.to(device) for key, x in self.columns.items()}
        for name in ("action", "_first", "_last", "_chunk", "_past", *(["_place"] if self.shared else [])):
            setattr(moved, name, getattr(self, name).to(device))
        return moved


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``; ``index_select`` copies whole rows, which is several times faster for images on a CPU."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)
