"""What learners share: what a wrapping passes on, and states that older versions wrote."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.offline.learner import Wrapping
from burnish.offline.sources import Rows
from burnish.policies.core.types import Learner
from offline_lab import a_batch, made

ASKED = ("plan", "observe", "stored", "q_values", "load_state_dict")


@pytest.mark.parametrize("name", ASKED)
def test_a_wrapping_passes_on_what_it_is_asked(name):
    heard = []
    inner: Any = type("Inner", (Learner,), {"actor": None, "policy": None, "afresh": True})()
    setattr(inner, name, heard.append)
    around = Wrapping(inner)
    getattr(around, name)("a fact")
    assert heard == ["a fact"] and around.afresh


def test_a_state_without_the_number_of_updates_is_read():
    """Older versions left it out of what Q-chunking saves."""
    learner, again = made("q_chunking"), made("q_chunking", seed=1)
    learner.update(Rows(a_batch()))
    state = learner.state_dict()
    assert state.pop("updates") == 1
    again.load_state_dict(state)
    ours, theirs = (x.update(Rows(a_batch())) for x in (learner, again))
    assert ours == theirs
