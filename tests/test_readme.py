"""The README says only what works: its Python runs as printed and its commands are known.

Where its links lead is looked at in tests/test_docs.py, beside the pages they lead to.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from burnish.policies.cli.cli import VERBS, main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


# As much less as shows that it runs; each must be found, so that none outlives what it shortened.
FEW = {"eval": {"episodes": 2, "worlds": 2, "confirm": 2}}
SHORTER = {
    "README.md": {"total=4_000": "total=48, **FEW", '"warmup": 1000': '"warmup": 16', "episodes=100": "episodes=4"},
    "docs/python.md": {
        "total=20_000": "total=48, **FEW",
        "total=5_000": 'loop={"warmup": 16}, total=48, **FEW',
        "4_000": "16",
        "1000": "16",
        "episodes=100": "episodes=4",
    },
}


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/python.md", marks=pytest.mark.slow)])
def test_python_runs_as_printed(tmp_path, monkeypatch, capsys, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = ["policy.net.mlp.hidden=[16]", "train.steps=20", "train.batch=16", "eval.episodes=4"]
    assert main(["collect", "env=two_mode", "episodes=12", "out=runs/data"]) == 0
    assert main(["pretrain", "policy=flow", "data=runs/data", "out=runs/bc", *small]) == 0
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks, f"{page} shows Python"
    program = "\n".join(blocks)
    for long, short in SHORTER.get(page, {}).items():
        assert long in program
        program = program.replace(long, short)
    capsys.readouterr()
    exec(compile(program, page, "exec"), {"FEW": FEW})
    assert "success_rate" in capsys.readouterr().out


@pytest.mark.slow
def test_commands_are_verbs_and_settings_that_exist(capsys):
    lines = re.findall(r"^burnish (\w+)([^#\n]*)", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    for verb, rest in lines:
        assert verb in VERBS
        # --help composes the settings, so a name that does not exist is refused.
        assert main([verb, *rest.split(), *([] if "--help" in rest else ["--help"])]) == 0, f"burnish {verb} {rest}"
    capsys.readouterr()
    assert main(["pretrain", "datta=runs/data", "--help"]) == 2, "the check must be able to fail"
