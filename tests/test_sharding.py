"""Ranks that share parameters, gradients and moments: the numbers and the checkpoints of one process, in half of the
memory."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharding_lab import KINDS, STEPS, STOP, held, made, run, trained
from test_imitate import TRAIN, learner
from test_ranks import ROUNDING, TORCHRUN

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.ranks import Ranks
from burnish.policies.runs.checkpoint import number
from burnish.policies.sharding import placed

PARTS = ("policy", "learner")


def lab(folder: Path, *words: str) -> list[dict[str, torch.Tensor]]:
    """What each of two ranks leaves."""
    command = [*TORCHRUN, str(Path(__file__).with_name("sharding_lab.py")), str(folder), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return [load_file(str(folder / f"{rank}.safetensors")) for rank in (0, 1)]


@pytest.mark.slow
def test_two_ranks_hold_half_each_and_any_number_goes_on(tmp_path):
    """Policies with frozen parts, in two number formats, and one without. Largest difference observed: 3e-6, of a map
    in front of layers in bfloat16, where a last digit may turn the rounding of what follows."""
    for kind in KINDS:
        run(kind, tmp_path / "alone" / kind)
        run(kind, tmp_path / "one" / kind, stop=STOP)
    both = lab(tmp_path)
    for kind in KINDS:
        assert run(kind, tmp_path / "two" / kind).step == STEPS
        alone = held(after_updates(kind))
        folders = {
            name: tmp_path / name / kind / "checkpoints" / number(STEPS) for name in ("alone", "both", "one", "two")
        }
        for part in PARTS:
            files = {name: folder / part for name, folder in folders.items()}
            wanted = load_file(files["alone"] / "state.safetensors")
            for name in ("both", "one", "two"):
                for text in ("config.yaml", "state.json"):
                    assert (files[name] / text).read_bytes() == (files["alone"] / text).read_bytes(), (kind, name, part)
                found = load_file(files[name] / "state.safetensors")
                assert found.keys() == wanted.keys()
                for key, x in wanted.items():
                    assert found[key].dtype == x.dtype and found[key].shape == x.shape
                    torch.testing.assert_close(found[key], x, rtol=0, atol=ROUNDING, msg=f"{kind}, {name}: {key}")
        for name, whole in alone.items():
            here, there = (int(x[f"{kind}/{name}"]) for x in both)
            # The first dimension of a tensor is divided, so the first rank may have a row more than the other.
            assert here >= there and whole <= here + there <= 1.05 * whole and here <= 0.56 * whole, (kind, name)
        assert alone["moments"] == 2 * alone["trained"] and (kind == "flow") is (alone["frozen"] == 0)
    assert (both[0]["shared"] - trained("vla")).abs().max() < ROUNDING, "each rank sees the pictures of its share alone"
    assert (both[0]["apart"] - trained("vla")).abs().max() > 100 * ROUNDING, "the control: gradients are not reduced"


def after_updates(kind: str):
    found = made(kind)
    found.update()
    return found


@pytest.mark.slow
def test_after_200_updates_the_weights_are_still_those_of_one_process(tmp_path):
    """Largest difference observed: 7e-7, and 5e-5 with a frozen part in bfloat16."""
    first, other = lab(tmp_path, "200")
    assert not other, "the other rank keeps no weights of all"
    for kind in ("flow", "vla"):
        assert (first[f"{kind}/long"] - trained(kind, steps=200)).abs().max() < ROUNDING, kind


def test_one_process_has_nothing_to_share():
    """And a setting of the run that several ranks take does not change it."""
    plain, shared = learner(), learner(train=replace(TRAIN, shard=True))
    for _ in range(2):
        plain.update()
        shared.update()
    pairs = zip(plain.policy.parameters(), shared.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_recorded_update_is_refused():
    train = replace(TRAIN, shard=True, execution=Execution.compile)
    with pytest.raises(BurnishError, match=r"train\.execution=compile does not go with train\.shard=true; take eager"):
        learner(train=train, ranks=Ranks(0, 2))


def test_a_policy_acts_elsewhere_and_comes_back():
    class Kept(torch.nn.Linear):
        def to(self, device):
            went.append(str(device))

    went: list[str] = []
    for device in ("meta", "cpu"):
        with placed(Kept(2, 2), torch.device(device)):
            went.append("acts")
    with placed(object(), torch.device("meta")):  # a policy of another program has no weights here
        pass
    assert went == ["meta", "acts", "cpu", "acts"]
