"""``policy=lerobot``: what is asked of LeRobot's process and how, what it never runs, and how it ends.

A stand-in (`lerobot_stand_in.py`) plays LeRobot, in this Python. One test asks the real one, where it is.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import demand
from safetensors.torch import load_file

from burnish.policies import chain
from burnish.policies.build import describe, load_policy, saved_policy
from burnish.policies.compose import Repeated
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.lerobot_layout import key_of
from burnish.policies.external import lerobot_server as server
from burnish.policies.external import side_process
from burnish.policies.external.lerobot import PYTHON, LeRobotConfig, LeRobotPolicy
from burnish.policies.external.recipes import ENVIRONMENTS
from burnish.policies.external.side_process import SideProcess
from burnish.policies.external.table import connect, identity
from burnish.policies.lerobot import hub
from burnish.policies.runs import checkpoint
from lerobot_stand_in import install, save

LIMITS = ActionSpec((-50.0, -50.0), (50.0, 50.0))
WORLD = EnvSpec(ObsSpec({"state": (2,), "image.top": (3, 4, 5)}), LIMITS, 10.0, "test", 20)
STORED = Path(__file__).parent / "lerobot_policies"
SOURCE = torch.Generator().manual_seed(0)
OBS = {
    "state": torch.randn(5, 2, generator=SOURCE),
    "image.top": torch.randint(0, 256, (5, 3, 4, 5), generator=SOURCE, dtype=torch.uint8),
}
STATE = {"state": OBS["state"]}
CLOSE = 1e-5  # of actions around 1: sums of some hundred float32 products in another order


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    return install(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def there(stand_in, monkeypatch):
    """This Python in the place of LeRobot's, with the stand-in."""
    monkeypatch.setenv(PYTHON, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(stand_in))


@pytest.fixture
def host(stand_in, tmp_path, monkeypatch):
    """The server's side alone, in this process."""
    monkeypatch.syspath_prepend(stand_in)
    before = set(sys.modules)
    yield lambda kind, **settings: server.Host(str(save(tmp_path / kind, kind, **settings)), "cpu")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "lerobot":
            del sys.modules[name]


def expected(obs, prompt):
    """The stand-in's actions, in units of the actuators."""
    total = 2 * obs["state"].sum(1) + obs["image.top"][:, 2, 1, 2] / 255 + len(prompt)
    ramp = torch.arange(3.0)
    return torch.stack([total[:, None] + ramp, total[:, None] - ramp], 2)


# ---- What is asked ----


def test_lerobot_plays_and_a_refined_policy_finds_it_again(there, tmp_path, monkeypatch, capfd):
    folder = save(tmp_path / "it", "steered", picture=True)
    config = LeRobotConfig(str(folder), keys={"image.top": "observation.images.front"}, prompt="lift", batch=2)
    policy = connect(config, WORLD)
    assert policy.spec.noise_shape == (3, 2) and policy.extensions == {"batch", "noise"}
    assert (policy.spec.horizon, policy.spec.execute, policy.spec.history) == (3, 2, 1)
    noise = torch.randn(5, 3, 2, generator=SOURCE)
    units = Scale(LIMITS).to_actuator(policy.act(OBS, noise=noise))
    assert torch.allclose(units, expected(OBS, "lift") + noise.sum(2, keepdim=True), atol=1e-4)
    assert identity(policy)["sha256"] and "path" not in identity(policy)

    made = Repeated(policy)
    checkpoint.save(tmp_path / "p", config=describe(made), state=made.state_dict())
    monkeypatch.setattr("burnish.policies.external.lerobot.SideProcess", None)  # the control: a start would fail
    with pytest.raises(BurnishError, match=r"a program would be started for it.*policy\.base="):
        load_policy(tmp_path / "p")
    changed = Path(shutil.copytree(folder, tmp_path / "other"))
    (changed / "config.json").write_text((changed / "config.json").read_text() + "\n")
    with pytest.raises(BurnishError, match="its sha256 differs"):
        load_policy(tmp_path / "p", base=str(changed))
    monkeypatch.setattr("burnish.policies.external.lerobot.SideProcess", SideProcess)
    moved = shutil.copytree(folder, tmp_path / "moved")
    again, _ = load_policy(tmp_path / "p", base=str(moved))
    assert torch.equal(again.act(OBS, noise=noise[:, 0]), made.act(OBS, noise=noise[:, 0]))
    process = policy._connection._process
    del policy, made
    assert process.wait(30) in (0, -9), "it ends with the policy"


@pytest.mark.parametrize(
    ("kind", "noise", "draws"),
    [
        ("chunked", None, False),
        ("steered", [3, 2], False),
        ("deaf", None, False),
        ("drawing", None, True),
        ("scheduled", [6, 2], True),
        ("single", None, False),
    ],
)
def test_noise_and_seeds_are_taken_where_they_are_used(kind, noise, draws, host):
    found = host(kind, horizon=6, n_obs_steps=2) if kind == "scheduled" else host(kind)
    assert (found.noise, found.draws) == (noise, draws)
    said = found.describe()
    assert said["extensions"] == ["batch", *(["noise"] if noise else []), *(["seed"] if draws else [])]
    assert said["chunk"] == [1 if kind == "single" else 3, 2] and said["execute"] == min(2, said["chunk"][0])


@pytest.mark.parametrize("kind", ["drawing", "scheduled"])
def test_a_draw_belongs_to_the_seed_of_its_row(kind, host):
    found = host(kind, horizon=6) if kind == "scheduled" else host(kind)

    def answer(*seeds):
        state = np.zeros((len(seeds), 2), np.float32)
        return found.answer({"batch": len(seeds), "observation.state": state, "seed": np.array(seeds)})

    one = answer(3, 8, 2**53 - 1)
    assert np.array_equal(one, answer(2**53 - 1, 8, 3)[::-1]) and np.array_equal(one[1:2], answer(8))
    assert not np.isclose(one[0], one[1]).any(), "the control"


def test_a_history_is_the_one_that_is_sent(host):
    found = host("scheduled", n_obs_steps=2, horizon=3)
    state = np.array([[[1, 0], [0, 3]]], np.float32)  # one row: a frame before, and now
    zeros = {"batch": 1, "observation.state": np.zeros_like(state)}
    for _ in range(2):  # nothing is left of the first request
        moved = found.answer({"batch": 1, "observation.state": state}) - found.answer(zeros)
        assert np.allclose(moved, 2 * (1 + 100 * 3), atol=1e-3)


def test_a_type_that_is_not_known_is_refused_unless_it_is_installed(host, tmp_path, monkeypatch):
    assert host("plugged").config.type == "plugged"
    with pytest.raises(ValueError, match=r"no policy 'os\.system', but broken, chunked.*install what brings it"):
        host("os.system")


# ---- What is not begun ----


def step(**changes):
    def change(folder):
        path = folder / "policy_postprocessor.json"
        found = json.loads(path.read_text())
        found["steps"][1] |= changes
        path.write_text(json.dumps(found))

    return change


def nameless(folder):
    step(**{"class": "os.system"})(folder)


def linked(folder):
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")


def adapter(folder):
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "use_peft": 1}))


REFUSED = {
    "a step that names code": (nameless, "LeRobot would import code"),
    "a step without a name": (step(registry_name=None), "LeRobot would import code"),
    "statistics elsewhere": (step(state_file="../it/statistics.safetensors"), "no plain file"),
    "weights elsewhere": (linked, "no plain file"),
    "an adapter": (adapter, "use_peft"),
    "a checkpoint of before": (lambda folder: (folder / "policy_preprocessor.json").unlink(), "before LeRobot 0.4"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    "no checkpoint": (lambda folder: (folder / "config.json").unlink(), "holds no policy of LeRobot"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_lerobot_is_not_given(case, tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON, "/bin/false")
    folder = save(tmp_path / "it", "chunked")
    config = LeRobotConfig(str(folder))
    with pytest.raises(BurnishError, match="has ended"):  # the control: it would be started
        LeRobotPolicy(config, WORLD)
    change, said = REFUSED[case]
    change(folder)
    with pytest.raises(BurnishError, match=said):
        LeRobotPolicy(config, WORLD)


def test_without_the_environment_it_is_said_how_it_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setenv("BURNISH_POLICIES", str(tmp_path))
    with pytest.raises(BurnishError, match="`burnish policies add lerobot` makes it"):
        LeRobotPolicy(LeRobotConfig(str(save(tmp_path / "it", "chunked"))), WORLD)


# ---- The process ----


def test_an_error_and_a_standstill_are_one_sentence(there, tmp_path, capfd):
    policy = LeRobotPolicy(LeRobotConfig(str(save(tmp_path / "a", "broken"))), WORLD)
    with pytest.raises(BurnishError, match=r"failed: ValueError: \\x1b\[2Jthe text of a policy"):
        policy.act(STATE)
    assert policy.act({"state": torch.zeros(1, 2)}).shape == (1, 3, 2), "it goes on"
    policy = LeRobotPolicy(LeRobotConfig(str(save(tmp_path / "b", "frozen")), timeout_s=0.5), WORLD)
    with pytest.raises(BurnishError, match=r"longer than policy\.timeout_s=0\.5"):
        policy.act(STATE)
    said = capfd.readouterr().err
    assert "LeRobot: \\x1b]0;standing still\n" in said and "\x1b" not in said


def script(text, tmp_path, monkeypatch):
    """Another program in the place of the server's."""
    path = tmp_path / "script.py"
    path.write_text("import os, sys, time\nfrom multiprocessing.connection import Connection\n" + text)
    monkeypatch.setattr(side_process.server, "__file__", str(path))
    return SideProcess(sys.executable, {"a": 1}, "it", start_s=20, timeout_s=1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('\\x1b[31mwhy'); sys.exit(3)", r"it has ended: status 3; it said last: \\x1b\[31mwhy"),
        ("os.kill(os.getpid(), 9)", "it has ended: killed by signal 9"),
        ("it = Connection(int(sys.argv[1])); it.send_bytes(b'[]'); it.send_bytes(b''); time.sleep(9)", "it has ended"),
        ("it = Connection(int(sys.argv[1])); it.send_bytes(b'{}'); it.send_bytes(b'x'); time.sleep(9)", "it has ended"),
        ("os.write(int(sys.argv[1]), bytes(3)); time.sleep(9)", "it has ended"),  # the beginning of a message
    ],
)
def test_a_process_that_dies_or_says_what_is_no_message(text, said, tmp_path, monkeypatch):
    began = time.monotonic()
    with pytest.raises(BurnishError, match=said):
        script(text, tmp_path, monkeypatch)
    assert time.monotonic() - began < 15


def test_on_windows_it_is_said_that_it_cannot_be_played(monkeypatch):
    monkeypatch.setattr(side_process, "os", SimpleNamespace(name="nt"))
    with pytest.raises(BurnishError, match="it cannot be played on Windows"):
        SideProcess(sys.executable, {}, "it", start_s=20, timeout_s=1)


def test_it_ends_with_its_parent_also_while_it_answers(tmp_path):
    """The parent is killed, and cannot say goodbye."""
    code = (
        f"import os, sys, threading, time\n{inspect.getsource(server._watch)}"
        "threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()\n"
        "print('there', flush=True); time.sleep(60)\n"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}, str(os.getpid())], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=120, check=False)
    child, until = Path(f"/proc/{int(found.stdout)}"), time.monotonic() + 20
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2] and time.monotonic() < until:
        time.sleep(0.1)
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


def test_what_runs_there_imports_nothing_of_ours():
    tree = ast.parse(Path(server.__file__).read_text(encoding="utf-8"), feature_version=(3, 10))
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    allowed = {*sys.stdlib_module_names, "numpy", "torch", "safetensors", "lerobot", "torchvision", "transformers"}
    assert {str(name).partition(".")[0] for name in names} <= allowed


# ---- The hub ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of Hugging Face with owner/act in it, and no network. The working directory is empty."""
    constants = demand("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo, revision = tmp_path / "hub" / "models--owner--act", "0" * 40
    snapshot = repo / "snapshots" / revision
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    for file in (STORED / "act").iterdir():
        shutil.copy(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_a_name_of_the_hub_is_read_from_the_cache(cache, monkeypatch):
    saved = saved_policy("owner/act")
    here = saved_policy(STORED / "act")
    assert saved.state.keys() == here.state.keys() and all(
        torch.equal(x, here.state[k]) for k, x in saved.state.items()
    )
    monkeypatch.setenv(PYTHON, "/bin/false")
    with pytest.raises(BurnishError, match="LeRobot with owner/act has ended"):  # it was begun, from the same folder
        LeRobotPolicy(LeRobotConfig("owner/act"), WORLD)
    weights = cache / "model.safetensors"
    (cache.parents[2] / "elsewhere").write_bytes(weights.read_bytes())
    weights.unlink()
    weights.symlink_to("../../../elsewhere")
    with pytest.raises(BurnishError, match="no plain file"):
        saved_policy("owner/act")


@pytest.mark.parametrize("choose", [saved_policy, lambda name: LeRobotPolicy(LeRobotConfig(name), WORLD)])
def test_a_name_that_cannot_be_had_is_one_sentence(choose, cache):
    with pytest.raises(BurnishError, match=r"owner/other is no folder here and not in the cache.*\(") as found:
        choose("owner/other")
    assert "\n" not in str(found.value)


def test_what_is_not_in_the_cache_is_fetched_and_nothing_that_runs(cache, monkeypatch):
    asked = []

    def download(name, **how):
        asked.append((name, how))
        if how.get("local_files_only"):
            raise FileNotFoundError
        return str(STORED / "act")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.snapshot("owner/new", ["config.json"]) == STORED / "act"
    assert all(name == "owner/new" and how["allow_patterns"] == hub.FETCHED for name, how in asked) and len(asked) == 2
    with pytest.raises(BurnishError, match=r"is no policy of LeRobot: it has no model\.bin"):
        hub.snapshot("owner/new", ["model.bin"])


def test_a_slip_of_the_keys_is_not_asked_of_the_hub(cache):
    (Path.cwd() / "runs").mkdir()
    assert hub.is_id("owner/act") and hub.is_id("lerobot/diffusion_pusht")
    for path in ("runs/missing", "/tmp/x/y", "act", "a/b/c", "../owner/act", "owner/", "./owner"):
        assert not hub.is_id(path)


# ---- The real one ----


@pytest.mark.slow
@pytest.mark.parametrize("name", ["act", "diffusion_ddim", "diffusion_ddpm"])
def test_the_real_one_acts_as_our_reader_does(name, monkeypatch):
    if not os.environ.get(PYTHON) and ENVIRONMENTS.made("lerobot") is None:
        pytest.skip("`burnish policies add lerobot` was not called on this machine")
    stored = load_file(STORED / name / "recorded.safetensors")
    obs = {key_of(key, image=False): x for key, x in stored.items() if key.startswith("observation.")}
    obs = {key: x[:, 0] for key, x in obs.items()} if name == "act" else obs
    ours, _ = load_policy(STORED / name)
    limits = ActionSpec((-10.0,) * ours.spec.action.dim, (10.0,) * ours.spec.action.dim)
    policy = LeRobotPolicy(LeRobotConfig(str(STORED / name)), EnvSpec(ours.spec.obs, limits, 10.0, "test", 20))
    assert policy.spec.noise_shape == (None if name == "act" else ours.spec.noise_shape)
    assert ("seed" in policy.extensions) == (name == "diffusion_ddpm")
    rows, noise = len(next(iter(obs.values()))), stored.get("noise")
    sources = [torch.Generator().manual_seed(0) for _ in range(rows)]  # the seed of rows that are given none

    def drawn(shape, *args, **kwargs):
        return torch.cat([torch.randn(1, *shape[1:], generator=source) for source in sources])

    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr(chain, "normal", drawn)
        native = ours.spec.executed(Scale(ours.spec.action).to_actuator(ours.act(obs, noise=noise)))
    asked = noise if policy.spec.noise_shape else None
    side = Scale(limits).to_actuator(policy.act(obs, noise=asked))[:, : native.shape[1]]
    assert (side - native).abs().max() < CLOSE
    source = [RowNoise([1, 2], [0, 0]), RowNoise([1, 2], [0, 0])]
    two = {key: x[:2] for key, x in obs.items()}
    assert torch.equal(*(policy.act(two, generator=x) for x in source)), "it repeats itself"
