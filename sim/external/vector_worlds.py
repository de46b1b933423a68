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

    def picture(self, i: int) -> Any:
        return self.worlds[0].render()[i]

    def answer(self, letter: bytes, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if letter in b"tpx":
            raise ValueError("an environment of gymnasium.vector has no place for an expert beside each world")
        chosen, finals = self.arrays["mask"].astype(bool), {}
        if letter not in b"rs" or not chosen.any():
            return super().answer(letter, header, data)
        if letter == b"s":
            finals = self._step(chosen, self.arrays)
        else:
            self._begin(chosen)
            self.moving |= chosen
        for row, x, leaf in zip(self.rows, self.last, self.leaves):
            row[chosen] = x[chosen]
            for i, obs in finals.items():
                row[i] = server.as_array(server.look_up(obs, leaf["path"]))
        return {}, b""

    def _begin(self, chosen: np.ndarray) -> None:
        before, self.ended = self.last, self.ended & ~chosen
        some = {"options": {"reset_mask": chosen.copy()}} if before and not chosen.all() else {}
        self._look(self.worlds[0].reset(seed=self.arrays["seeds"].tolist(), **some)[0])
        if some and any(x[~chosen].tobytes() != y[~chosen].tobytes() for x, y in zip(self.last, before)):
            raise ValueError("it has begun worlds that it should not: its reset must heed options['reset_mask']")

    def _step(self, chosen: np.ndarray, a: dict[str, np.ndarray]) -> dict[int, Any]:
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
        for i in np.flatnonzero(chosen):
            said = info["final_info"] if self.ended[i] and "final_info" in info else info
            keys = [x for x in (self.success or "", *server.SUCCESS) if x in said and said.get("_" + x, chosen)[i]]
            a["success"][i] = self._succeeded({x: said[x][i] for x in keys}, bool(terminated[i]))
        return {i: info["final_obs"][i] for i in np.flatnonzero(chosen & self.ended).tolist() if "final_obs" in info}

    def _look(self, obs: Any) -> None:
        self.last = [server.as_array(server.look_up(obs, leaf["path"])).copy() for leaf in self.leaves]
