"""What a stranger made is loaded, and nothing happens: one sentence, no code, no file touched, in bounds of time and
memory. And the control: loaders that others use on such files are caught by the same watch."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import artefact_lab
import artefact_limits
import artefacts
import decompression_bombs
from artefacts import Payload

ARTEFACTS = {**artefacts.ARTEFACTS, **decompression_bombs.ARTEFACTS, **artefact_limits.ARTEFACTS}


# Bytes of memory that one artefact may cost: a few times what the largest of the files below have.
GROWN = 1 << 30


class Watched:
    """One process that has imported everything, and forks for each artefact."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("good", "made", "out", "outside"):
            (root / name).mkdir()
        artefacts.good(root / "good")
        decompression_bombs.good(root / "good")
        artefact_limits.good(root / "good")
        os.mkfifo(root / "out" / "pipe")
        (root / "outside" / "secret").write_text("SECRET")
        (root / "outside" / "evil.yaml").write_text("policy: {_target_: os.system, command: 'touch CANARY'}\n")
        (root / "outside" / "evil.py").write_text("open('CANARY', 'w')\n")
        self.before = self.outside()
        surroundings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, artefact_lab.__file__, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=root / "out", env=surroundings,
        )  # fmt: skip
        good = root / "good"
        for way, words in (
            ("command", ["export", f"policy.path={good}/checkpoint", f"out={root}/out/warm"]),
            ("command", ["evaluate", f"policy.path={good}/nothing"]),
            ("command", ["evaluate", "policy=callable", "policy.name=none", "env=point_reach"]),
            ("command", ["evaluate", "policy=onnx", "policy.path=none", "env=point_reach"]),
            ("command", ["pretrain", f"data={good}/dataset", "policy.none=1"]),
            ("command", ["report", f"run={good}/run", f"out={root}/out/warm.html"]),
            ("command", ["pretrain", f"data={good}/dataset", "policy=flow", f"out={good}/run", "resume=true"]),
            ("command", ["compare", f"base={good}/checkpoint", "methods=dsrl", "world=none"]),
            ("acted", [f"{good}/checkpoint"]),
            ("played", [f"{good}/bundle"]),
            ("dataset", [f"{good}/pictures"]),
            ("states", [f"{good}/pictures"]),
            ("bundle", [f"{good}/bundle"]),
            ("bundle", [f"{good}/network"]),
            ("calibration", [f"{good}/calibration/arm.json"]),
        ):
            self._say({"warm": True, "way": way, "words": words})

    def _say(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def load(self, way: str, *words: str, seconds: int = artefact_lab.SECONDS) -> dict[str, Any]:
        self._say({"way": way, "words": words, "seconds": seconds})
        assert self.process.stdout is not None
        line = next(line for line in self.process.stdout if line.startswith("="))
        return json.loads(line[1:])

    def outside(self) -> str:
        files = [(str(p), p.read_bytes()) for p in sorted((self.root / "outside").rglob("*")) if p.is_file()]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    def canaries(self) -> list[Path]:
        return [*self.root.rglob("CANARY*")]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[Watched]:
    found = Watched(tmp_path_factory.mktemp("artefacts"))
    yield found
    found.close()


@pytest.mark.slow
def test_what_is_good_loads(watched: Watched):
    """Otherwise the refusals below would prove nothing; and the watch has nothing against it."""
    good = watched.root / "good"
    for way, *words in (
        ("command", "export", f"policy.path={good}/checkpoint", f"out={watched.root}/out/again"),
        ("checkpoint", f"{good}/checkpoint"),
        ("command", "report", f"run={good}/run", f"out={watched.root}/out/report.html"),
        ("dataset", f"{good}/dataset"),
        ("dataset", f"{good}/pictures"),
        ("states", f"{good}/pictures"),
        ("bundle", f"{good}/bundle"),
        ("bundle", f"{good}/network"),
        ("calibration", f"{good}/calibration/arm.json"),
    ):
        found = watched.load(way, *words)
        assert (found["status"], found["ended"]) == (0, "in time"), found
        # Saving asks git for the revision of the code, and an export has a folder of its own for a while.
        folders = [act.split(": ")[1] for act in found["acts"] if act.startswith("tempfile.mkdtemp: ")]
        passed = ("'git'", *folders)
        assert len(folders) == (words[0] == "export"), found
        assert [act for act in found["acts"] if not any(word in act for word in passed)] == [], found


def test_there_are_as_many_as_promised():
    assert len(ARTEFACTS) >= 50 and {name.split(":")[0] for name in ARTEFACTS} >= {"checkpoint", "dataset", "settings"}


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", ARTEFACTS)
def test_a_hostile_artefact_gets_one_sentence_and_does_nothing(watched: Watched, name: str):
    artefact = ARTEFACTS[name]
    path = watched.root / "made" / "it"
    for left in (path, watched.root / "out" / "compare"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(watched.root / "good" / artefact.of, path)
    artefact.change(path)
    known = {"path": str(path), "root": str(watched.root), "out": str(watched.root / "out")}
    words = [word.format(**known) if "${" not in word and ": {" not in word else word for word in artefact.words]
    found = watched.load(artefact.way, *words)
    assert found["acts"] == [], found
    assert found["ended"] == "in time", found
    assert found["status"] == 2 or (artefact.harmless and found["status"] == 0), found
    # What is misspelt is answered with all that could have been meant, which is long.
    lines = found["said"].strip().splitlines()
    assert (found["status"] == 2) <= len(lines) <= 1 and len(found["said"]) < 2500, found["said"]
    assert "Traceback" not in found["said"]
    # Neither what lies outside nor what is in the environment is looked up; how it is called may be repeated.
    assert "SECRET" not in found["said"].replace("CANARY_SECRET", "")
    assert found["grown"] < GROWN, found
    assert not watched.canaries() and watched.outside() == watched.before


def test_the_watch_sees_loaders_that_obey(watched: Watched):
    """The control: each does what it was told by a file, and is seen doing it."""
    made = watched.root / "made"
    (made / "pickle").write_bytes(pickle.dumps(Payload()))
    (made / "yaml").write_text("!!python/object/apply:os.system ['true']")
    (made / "hydra").write_text(f"_target_: builtins.open\n_args_: ['{made}/opened', w]\n")
    (made / "control.py").write_text("x = 1\n")
    for way, words, act in (
        ("unpickled", made / "pickle", "pickle.find_class"),
        ("unsafe_yaml", made / "yaml", "os.system"),
        ("instantiated", made / "hydra", "open"),
        ("imported", made / "control.py", "exec"),
        ("written", made / "touched", "open"),
        ("read", watched.root / "outside" / "secret", "open"),
    ):
        found = watched.load(way, str(words))
        assert any(x.startswith(act) for x in found["acts"]), (way, found)
    # On a machine that is busy enough the bound of waiting comes before that of computing.
    assert watched.load("endless", "x", seconds=1)["ended"] != "in time"
    for canary in watched.canaries():
        canary.unlink()
