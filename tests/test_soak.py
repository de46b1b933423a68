"""``make soak`` runs what has a long version, all of it and nothing else, and says in the end what was shown."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from conftest import core_first

import soak

HERE = Path(__file__).parent
LENGTHS = {"SOAK", "often"}  # names by which a test asks how long the occasion is


def asks(path: Path) -> bool:
    """It imports one of them, from here or from a module that hands it on."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(alias.name in LENGTHS for node in found for alias in node.names)


def test_every_test_with_a_long_version_is_a_part():
    files = {f"tests/{path.name}" for path in HERE.glob("test_*.py") if path != Path(__file__) and asks(path)}
    parts = {test.split("::")[0] for part in soak.PARTS for test in part.tests}
    assert files == parts
    # The switch is looked at in one place, so it has one meaning.
    looked = re.compile(r"os\.environ.*BURNISH_SOAK\"")
    named = {path.name for path in HERE.glob("*.py") if looked.search(path.read_text(encoding="utf-8"))}
    assert named == {"soak.py"}


def test_every_part_names_tests_that_are_there():
    for part in soak.PARTS:
        for test in part.tests:
            file, _, name = test.partition("::")
            tree = ast.parse((HERE.parent / file).read_text(encoding="utf-8"))
            assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_end_says_what_held(monkeypatch, capsys):
    parts = (soak.Part("one", "that it is", 1, ()), soak.Part("two", "that it is not", 1, (), alone=True))
    monkeypatch.setattr(soak, "PARTS", parts)
    monkeypatch.setattr(soak, "run", lambda part: (part.name == "one", 60.0))
    assert soak.main([]) == 1
    said = capsys.readouterr().err
    assert "holds   one (60 s): that it is" in said and "FAILED  two" in said
    assert soak.main(["one"]) == 0 and soak.main(["three"]) == 2


def test_ci_plays_one_short_part_and_the_next_run_another(monkeypatch):
    short = [part.name for part in soak.PARTS if part.minutes <= 1]
    assert len(short) > 1
    played = []
    monkeypatch.setattr(soak, "run", lambda part: (played.append(part.name) or True, 1.0))
    for turn in range(len(short)):
        monkeypatch.setattr(soak, "TURN", str(turn))
        assert soak.main(["turn"]) == 0 and len(played) == turn + 1
    assert sorted(played) == sorted(short)
    monkeypatch.setattr(soak, "TURN", "all")
    assert sorted(soak.whose_turn()) == sorted(short)


def test_quick_files_come_first_and_whole():
    def file(name, *tests):
        return [SimpleNamespace(path=name, keywords=set(marks.split())) for marks in tests]

    one, many = file("one", "", "slow"), file("many", "slow", "slow sim", "")
    world, core, late = file("world", "sim", ""), file("core", "", "", "rotating"), file("late", "")
    assert core_first([*one, *world, *core, *many, *late]) == [*core, *late, *world, *many, *one]


def test_progress_speaks_once_a_minute_and_only_in_the_soak(monkeypatch, capsys):
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(soak.time, "monotonic", lambda: next(now))
    assert list(soak.Progress("nothing", 3).along(range(3))) == [0, 1, 2] and not capsys.readouterr().err
    monkeypatch.setattr(soak, "SOAK", True)
    list(soak.Progress("writes", 10).along(range(10)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("  writes: 2 of 10, about")


def test_one_value_means_the_soak():
    for value, expected in (("1", "20"), ("0", "2"), ("", "2"), ("5000", "2")):
        code = "import soak; print(soak.often(2, 20))"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=HERE, env={"BURNISH_SOAK": value}, capture_output=True, text=True
        )
        assert run.stdout.strip() == expected, (value, run.stderr)
