"""The command line as a user has it: the one sentence of a refusal, and a policy to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.policies.cli.cli import main


def refused(capture: Any, *words: str) -> str:
    """The one sentence by which a command is refused; what was said before it is forgotten."""
    capture.readouterr()
    assert main(list(words)) == 2
    out, err = capture.readouterr()
    assert err.startswith(f"burnish {words[0]}: ") and err.count("\n") == 1 and "Traceback" not in out + err, err
    return err.strip()


def imitating(folder: Path, *words: str, name: str = "bc") -> Path:
    """``folder`` with recordings in data/ and, under that name, a flow that imitates them a little, as words say."""
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=6", f"out={folder}/data"]) == 0
    small = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    assert main(["pretrain", *small, f"data={folder}/data", f"out={folder}/{name}", *words]) == 0
    return folder
