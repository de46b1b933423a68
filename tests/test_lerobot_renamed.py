"""LeRobot's checkpoints that rename observations: they are read once `policy.keys` says what these are called here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_lerobot_policies import STORED, processor

from burnish.policies.build import load_policy
from burnish.policies.core.errors import BurnishError


def renaming(folder: Path, names: dict[str, str]) -> Path:
    copy = Path(shutil.copytree(STORED / "act", folder / "act"))
    processor(0, config={"rename_map": names})(copy)
    return copy


@pytest.mark.parametrize("called", ["state", "observation.state"])
def test_a_name_that_is_given_opens_it(called, tmp_path):
    folder = renaming(tmp_path, {"observation.joints": "observation.state"})
    with pytest.raises(BurnishError, match=r"renames observations; .*policy\.keys=\{joints: observation\.state\}"):
        load_policy(folder)
    policy, _ = load_policy(folder, keys={"joints": called})
    assert set(policy.spec.obs.shapes) == {"joints", "environment_state"}
    with pytest.raises(BurnishError, match="renames observations"):  # the control: another one was named
        load_policy(folder, keys={"goal": "environment_state"})


def test_names_that_it_does_not_observe_change_nothing(tmp_path):
    folder = renaming(tmp_path, {"observation.wrist": "observation.images.wrist"})
    assert load_policy(folder)[0].spec.obs.shapes == load_policy(STORED / "act")[0].spec.obs.shapes
