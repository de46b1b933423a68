"""The unmodified client of openpi talks to our server. It pins numpy below 2, so it lives in an environment of its own,
made once per run of the tests from the package index."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from burnish.policies.core.scale import Scale
from server_lab import LIMITS, flow, served

# typing_extensions is imported by openpi-client 0.1.2 and not required by it.
PACKAGES = ("openpi-client==0.1.2", "typing_extensions")
KEY = "a key of more than sixteen letters"
PROGRAM = """
import json, sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
url, key = sys.argv[1], sys.argv[2] or None
policy = WebsocketClientPolicy(url, api_key=key)
state = np.arange(6.0).reshape(2, 3) / 10
said = {"metadata": policy.get_server_metadata(), "numpy": np.__version__}
said["float64"] = policy.infer({"state": state, "noise": np.zeros((5, 2)), "prompt": "pick"})["actions"].tolist()
said["float32"] = policy.infer({"state": state.astype(np.float32), "noise": np.zeros((5, 2), "f4")})["actions"].tolist()
said["seed"] = [policy.infer({"state": state, "seed": np.int64(3)})["actions"].tolist() for _ in range(2)]
try:
    policy.infer({"state": state * np.nan})
except RuntimeError as error:
    said["refusal"] = str(error)
said["after"] = policy.infer({"state": state, "obs_seq": 9})["obs_seq"]
policy.reset()
print(json.dumps(said, default=str))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with openpi's client and what it pins."""
    folder = tmp_path_factory.mktemp("openpi")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    made = subprocess.run(pip, capture_output=True, text=True)
    return (folder / "bin/python") if made.returncode == 0 else None, made.stderr[-300:]


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "with a key"])
def test_the_client_of_openpi_is_served(python, require, key):
    interpreter, trouble = python
    require(interpreter is not None, f"no environment for openpi-client: {trouble}")
    policy = flow()
    with served(policy, key=key) as server:
        run = subprocess.run(
            [interpreter, "-c", PROGRAM, server.url, key or ""], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        if key is not None:
            refused = subprocess.run(
                [interpreter, "-c", PROGRAM, server.url, ""], capture_output=True, text=True, timeout=120
            )
            assert refused.returncode != 0 and "401" in refused.stderr, "control: without its key it is not let in"
    said = json.loads(run.stdout)
    assert said["numpy"].startswith("1."), "the environment is its own"
    assert {"batch", "noise", "seed", "reset"} < set(said["metadata"]["extensions"])
    state = torch.arange(6.0).reshape(1, 2, 3) / 10
    chunk = policy.act({"state": state}, noise=torch.zeros(1, 5, 2))[0, 1:].detach()
    for name in ("float64", "float32"):
        np.testing.assert_allclose(said[name], Scale(LIMITS).to_actuator(chunk), atol=1e-6)
    assert said["seed"][0] == said["seed"][1] != said["float64"]
    assert said["refusal"].splitlines()[-1] == "value: 'state' is not finite" and said["after"] == 9
