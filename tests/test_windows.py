"""All but robots runs with what Python has on Windows: our modules are shown that Python, on this system.

First what the syntax trees say: what POSIX alone has is asked for before it is used. Then what stands in its place is
played.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_structure import FOLDERS, Module, inside, last_name, modules, nodes
from windows_lab import MODULES, POSIX_MODULES, POSIX_NAMES, import_on_windows, open_file

from burnish.policies.core import files
from burnish.policies.core.errors import BurnishError

# ---- what the trees say ----


def heads(module: Module) -> Iterator[tuple[int, str]]:
    """The imports that happen when the module is imported."""
    functions = [*nodes(module, ast.FunctionDef), *nodes(module, ast.AsyncFunctionDef)]
    for line, name in module.imports():
        if not any(node.lineno < line <= node.end_lineno for node in functions):
            yield line, name


def posix_heads(module: Module) -> Iterator[str]:
    for line, name in heads(module):
        if inside(name, tuple(POSIX_MODULES)):
            yield f"{module.path}:{line}: Windows has no {name}; import it in the function that can do without"


def posix_names(module: Module) -> Iterator[str]:
    for node in nodes(module, ast.Attribute):
        owner = last_name(node.value)
        if node.attr in POSIX_NAMES.get(owner, ()) and f'hasattr({owner}, "{node.attr}")' not in module.source:
            yield f"{module.path}:{node.lineno}: Windows has no {owner}.{node.attr}; ask for it by hasattr"


def test_all_but_robots_asks_before_it_uses_what_posix_alone_has():
    found = [module for module in modules(*FOLDERS) if not module.within("real_robot")]
    assert len(found) > 200
    assert [said for module in found for rule in (posix_heads, posix_names) for said in rule(module)] == []


def test_so_does_what_the_rest_imports_of_robots():
    known = {module.name: module for module in modules(*FOLDERS)}
    reached: set[str] = set()
    waiting = [name for name in known if not inside(name, ("real_robot",))]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        for _, dotted in heads(known[name]):
            parts = dotted.split(".")[
                1:
            ]  # "a.b.c" may be a module or a name of one, and imports the packages around it
            taken = {".".join(parts[: k + 1]) for k in range(len(parts))}
            waiting += [part for part in taken if part in known and part not in reached]
    assert {"real_robot.safety.guard", "real_robot.safety"} <= reached
    assert [said for name in sorted(reached) for said in posix_heads(known[name])] == []
    assert list(posix_heads(known["real_robot.control.shared_memory"])), "the control: this one needs Linux"


@pytest.mark.parametrize(
    ("source", "complains"),
    [
        ("import fcntl", True),
        ("class A:\n    from pty import spawn", True),
        ("import os\nos.fork()", True),
        ("import os\nflags = os.O_RDONLY | os.O_NOFOLLOW", True),
        ("def f():\n    import resource", False),
        ('import os\nif hasattr(os, "fork"):\n    os.fork()', False),
        ("import os, signal\nos.replace(a, b)\nsignal.signal(signal.SIGINT, f)", False),
    ],
)
def test_the_rules_can_fail(source: str, complains: bool):
    module = Module("sim/a.py", source)
    assert bool([*posix_heads(module), *posix_names(module)]) == complains


# ---- what is played ----


@pytest.mark.slow
def test_a_policy_is_recorded_trained_refined_and_judged(tmp_path):
    temporary = files.new(tmp_path / "temporary")
    program = [sys.executable, str(Path(__file__).with_name("windows_lab.py")), str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    run = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.startswith("imported ") and run.stdout.endswith("trained\n"), run.stderr
    assert not list(tmp_path.glob(".*.partial")), "the hidden folder of the recordings is removed"
    left = list(temporary.glob("burnish-mapped-*"))
    assert left, "the control: while a file is mapped its name cannot be removed"


def test_the_stand_in_has_what_windows_has_and_no_more(tmp_path):
    ours, others = {"__name__": "burnish.sim.a"}, {"__name__": "torch"}
    with pytest.raises(ImportError, match=r"burnish.sim.a imports fcntl"):
        import_on_windows("fcntl", ours)
    assert import_on_windows("fcntl", others) and import_on_windows("os", others) is os
    system = import_on_windows("os", ours)
    assert system is MODULES["os"] and system.name == "nt" and system.getpid() == os.getpid()
    assert hasattr(os, "fork") and not hasattr(system, "fork")
    with pytest.raises(PermissionError):
        open_file(tmp_path, os.O_RDONLY)


def test_a_junction_counts_as_a_link(tmp_path, monkeypatch):
    """Tags of Windows: 0xA0000003 is a junction; 0x9000001A a file that OneDrive has not fetched yet, which is none."""
    folder, tags = files.new(tmp_path / "folder"), iter((0xA0000003, 0x9000001A))
    seen = os.lstat(folder)
    monkeypatch.setattr(os, "lstat", lambda path: SimpleNamespace(st_mode=seen.st_mode, st_reparse_tag=next(tags)))
    with pytest.raises(BurnishError, match="folder is a link to another place"):
        files.refuse_link(folder)
    assert files.refuse_link(folder) == folder


def test_a_file_that_is_no_longer_the_one_that_was_opened_is_not_written(tmp_path, monkeypatch):
    """Where no flag forbids to follow a link, one that is planted after the look is seen after the opening."""
    (tmp_path / "precious").write_text("precious")
    opened = os.open

    def planting(path, *more):
        (tmp_path / "log").symlink_to(tmp_path / "precious")
        return opened(path, *more)

    monkeypatch.setattr(files, "CAREFUL", 0)
    monkeypatch.setattr(os, "open", planting)
    with pytest.raises(BurnishError, match="log is a link to another place"):
        files.growing(tmp_path / "log")
    (tmp_path / "log").unlink()

    def replacing(path, *more):
        descriptor = opened(path, *more)
        (tmp_path / "log").rename(tmp_path / "old")
        (tmp_path / "log").write_text("another")
        return descriptor

    monkeypatch.setattr(os, "open", replacing)
    with pytest.raises(BurnishError, match="log was replaced while it was opened"):
        files.growing(tmp_path / "log")
    assert (tmp_path / "precious").read_text() == "precious" and (tmp_path / "log").read_text() == "another"
