"""Torch's threads shall not spin on cores that others need, and its sums shall repeat: read when it is loaded."""

import os
import subprocess
import sys

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MKL_CBWR")
ASK = "import burnish.{0}, os, sys; print('torch' in sys.modules, *map(os.environ.get, ('GOMP_SPINCOUNT', 'MKL_CBWR')))"


def answer(package, **variables):
    inherited = {key: x for key, x in os.environ.items() if key not in NAMES}
    found = subprocess.run(
        [sys.executable, "-c", ASK.format(package)],
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split()


@pytest.mark.parametrize("package", ["policies", "sim", "finetune", "offline"])
def test_every_package_says_how_threads_wait_before_torch_is_there(package):
    assert answer(package) == ["False", "1000", "AUTO,STRICT"]


def test_whoever_says_otherwise_is_obeyed():
    assert answer("finetune", GOMP_SPINCOUNT="7") == ["False", "7", "AUTO,STRICT"]
    assert answer("finetune", OMP_WAIT_POLICY="active") == ["False", "None", "AUTO,STRICT"]
    assert answer("finetune", MKL_CBWR="COMPATIBLE") == ["False", "1000", "COMPATIBLE"]
