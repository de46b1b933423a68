"""The worlds of one environment of `gymnasium.vector`, for `world_server.py`, which runs this file where it is needed.

As that one: NumPy alone, for Python 3.8 and newer. ``server`` is the module that runs it, under whatever name it has;
imported as a module, it takes the one beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING or "server" not in globals():
    from . import world_server as server


class Batch(server.Host):
    """The rows of one environment of `gymnasium.vector`, each begun on its seed, whatever it begins by itself. A step
    moves all rows: one that was left out goes on only by a reset. None can be played again alone."""

    def __init__(self, recipe: dict[str, Any], worlds: list[Any]) -> None:
        super().__init__(recipe, worlds)
        self.moving, self.ended = np.zeros((2, len(worlds)), bool)
        self.last: list[np.ndarray] = []  # what all rows show
        mode = str((getattr(worlds[0], "metadata", None) or {}).get("autoreset_mode", "")).upper()
        own = type(getattr(worlds[0], "unwrapped", worlds[0])).__module__.startswith("gymnasium.")
        # Rows that ended are not begun in the same step; Gymnasium 1.0 does not say so of its own.
        self.waits = "NEXT" in mode or "DISABLED" in mode or (own and not mode)

    def answer(self, letter: bytes, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if letter in b"tpxb":
            raise ValueError("an environment of gymnasium.vector has no place for an expert beside each world")
        chosen, finals = self.arrays["mask"].astype(bool), {}
        if letter not in b"rs" or not chosen.any():
            return super().answer(letter, header, data)
        if letter == b"s":
            finals = self._step(chosen, self.arrays)
        else:
            self._begin(chosen)
            self.moving |= chosen
        for k, (row, x) in enumerate(zip(self.rows, self.last)):
            row[chosen] = x[chosen]
            for i, seen in finals.items():
                row[i] = seen[k]
        return {}, b""

    def _begin(self, chosen: np.ndarray) -> None:
        before, self.ended = self.last, self.ended & ~chosen
        some = {"options": {"reset_mask": chosen.copy()}} if before and not chosen.all() else {}
        self._look(self.worlds[0].reset(seed=self.arrays["seeds"].tolist(), **some)[0])
        if some and any(x[~chosen].tobytes() != y[~chosen].tobytes() for x, y in zip(self.last, before)):
            raise ValueError("it has begun worlds that it should not: its reset must heed options['reset_mask']")

    def _step(self, chosen: np.ndarray, a: dict[str, np.ndarray]) -> dict[int, list[np.ndarray]]:
        """Of rows that the environment has begun again already: where the last step of theirs led."""
        if (late := chosen & ~self.moving).any():
            raise ValueError(f"world {late.argmax()} stood by while others moved; reset it before it acts")
        if self.ended.any():  # and stands by: the others may go on
            self._begin(self.ended)
        obs, *facts, info = self.worlds[0].step(a["action"].astype(self.box.dtype).reshape(-1, *self.box.shape))
        self._look(obs)
        reward, terminated, truncated = map(server.as_array, facts)
        self.ended = terminated | truncated
        self.moving &= chosen & ~self.ended
        a["reward"][chosen], a["terminated"][chosen] = reward[chosen], terminated[chosen]
        a["truncated"][chosen] = (truncated & ~terminated)[chosen]
        for i in np.flatnonzero(chosen).tolist():
            a["success"][i] = self._succeeded(self._said(info, i), bool(terminated[i]))
        return self._finals(info, np.flatnonzero(chosen & self.ended).tolist())

    def _finals(self, info: dict[str, Any], ended: list[int]) -> dict[int, list[np.ndarray]]:
        """By the names of Gymnasium and of 0.29: an array of what each row saw, or an observation of all rows."""
        seen = next((info[key] for key in ("final_obs", "final_observation") if key in info), None)
        if seen is None:
            if ended and not self.waits:
                raise ValueError(
                    "it shows no last observation of rows that ended (final_obs), though its metadata does not say "
                    "autoreset_mode NEXT_STEP or DISABLED; say the mode there that it has"
                )
            return {}
        if isinstance(seen, list) or (isinstance(seen, np.ndarray) and seen.dtype.kind == "O"):
            parts = list(zip(self.leaves, self.rows))
            return {
                i: [server.read(seen[i], leaf["path"], row.dtype, row.shape[1:]) for leaf, row in parts] for i in ended
            }
        whole = self._read(seen)
        return {i: [x[i] for x in whole] for i in ended}

    def _said(self, info: dict[str, Any], i: int) -> dict[str, Any]:
        """The info of row ``i``, of its last step where it has ended: in arrays, or a dict as Gymnasium 0.29 has it."""
        said = info["final_info"] if self.ended[i] and info.get("final_info") is not None else info
        if not isinstance(said, dict):
            return said[i] or {}
        keys = [key for key in (self.success or "", *server.SUCCESS) if key in said]
        return {key: said[key][i] for key in keys if "_" + key not in said or said["_" + key][i]}

    def _look(self, obs: Any) -> None:
        self.last = [x.copy() for x in self._read(obs)]

    def _read(self, obs: Any) -> list[np.ndarray]:
        return [server.read(obs, leaf["path"], row.dtype, row.shape) for leaf, row in zip(self.leaves, self.rows)]
