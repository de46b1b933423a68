"""The README says only what works: its Python runs as printed, its commands are known, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from burnish.policies.core.cli import VERBS, main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["policy.net.mlp.hidden=[16]", "train.steps=20", "train.batch=16", "trial.episodes=4"]
    assert main(["collect", "env=two_mode", "episodes=12", "out=runs/data"]) == 0
    assert main(["pretrain", "policy=flow", "data=runs/data", "out=runs/bc", *small]) == 0
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks, "the README shows Python"
    capsys.readouterr()
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
    assert "success_rate" in capsys.readouterr().out


def test_commands_are_verbs_and_settings_that_exist(capsys):
    lines = re.findall(r"^burnish (\w+)([^#\n]*)", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    for verb, rest in lines:
        assert verb in VERBS
        # --help composes the settings, so a name that does not exist is refused.
        assert main([verb, *rest.split(), *([] if "--help" in rest else ["--help"])]) == 0, f"burnish {verb} {rest}"
    capsys.readouterr()
    assert main(["pretrain", "datta=runs/data", "--help"]) == 2, "the check must be able to fail"


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="only the tree holds what the README links to")
def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", TEXT)
    assert len(targets) >= 4
    assert [target for target in targets if not (ROOT / target).exists()] == []
