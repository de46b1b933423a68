"""`policies/core/files.py` follows no planted link, and nothing in the package writes but through it.

That the verbs use it in the right places is seen in test_links.py, which plants links for all that they write.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from test_structure import FOLDERS, Module, last_name, modules, nodes

from burnish.policies.core import files
from burnish.policies.core.errors import BurnishError

# ---- what it does ----


@pytest.fixture
def place(tmp_path):
    """A folder that a stranger has prepared, and one outside of it."""
    for name in ("outside/folder", "inside"):
        (tmp_path / name).mkdir(parents=True)
    outside = tmp_path / "outside"
    (outside / "file").write_text("precious\n")
    (outside / "folder/file").write_text("precious\n")
    inside = tmp_path / "inside"
    (inside / "symbolic").symlink_to(outside / "file")
    (inside / "dangling").symlink_to(outside / "absent")
    (inside / "folder").symlink_to(outside / "folder")
    os.link(outside / "file", inside / "hard")
    yield inside
    left = {path.relative_to(outside).as_posix() for path in outside.rglob("*")}
    assert left == {"file", "folder", "folder/file"}
    assert (outside / "file").read_text() == (outside / "folder/file").read_text() == "precious\n"


LINKS = ["symbolic", "dangling", "hard"]


@pytest.mark.parametrize("name", [*LINKS, "folder"])
def test_a_file_takes_the_place_of_a_link(place, name):
    files.replace(place / name, "mine\n")
    assert not (place / name).is_symlink() and (place / name).read_text() == "mine\n"
    assert {path.name for path in place.iterdir()} == {*LINKS, "folder"}, "nothing is left beside it"


@pytest.mark.parametrize("name", LINKS)
def test_a_scratch_file_that_was_guessed_is_not_written_through(place, name):
    (place / name).rename(place / ".out.json.scratch")
    files.replace(place / "out.json", b"mine")
    assert (place / "out.json").read_text() == "mine"


@pytest.mark.parametrize("name", LINKS)
def test_a_new_file_and_a_fresh_one(place, name):
    with pytest.raises(FileExistsError):
        files.write_new(place / name, "mine")
    with files.fresh(place / name) as file:
        file.write("mine")
    assert (place / name).read_text() == "mine" and not (place / name).is_symlink()


@pytest.mark.parametrize("name", LINKS)
def test_what_grows_is_no_link(place, name):
    with pytest.raises(BurnishError, match=rf"{name} (is a link to another place|has a second name)"):
        files.growing(place / name)
    for _ in range(2):
        with files.growing(place / "plain") as file:
            file.write("line\n")
    assert (place / "plain").read_text() == "line\nline\n"


@pytest.mark.parametrize("name", ["symbolic", "dangling"])
def test_a_lock_is_no_link_and_changes_nothing(place, name):
    with pytest.raises(BurnishError, match=f"{name} is a link"), files.locked(place / name, "taken"):
        pass
    (place / "lock").write_text("text of somebody")
    before = (place / "lock").stat().st_mtime_ns
    with files.locked(place / "lock", "taken"), pytest.raises(BurnishError, match="taken"):
        files.locked(place / "lock", "taken").__enter__()
    assert (place / "lock").read_text() == "text of somebody" and (place / "lock").stat().st_mtime_ns == before


def test_a_pipe_makes_nobody_wait(place):
    os.mkfifo(place / "pipe")
    for opened in (lambda: files.locked(place / "pipe", "taken").__enter__(), lambda: files.growing(place / "pipe")):
        with pytest.raises((BurnishError, OSError)):
            opened()


@pytest.mark.parametrize("name", ["folder", "dangling"])
def test_no_folder_below_is_a_link(place, name):
    with pytest.raises(BurnishError, match=rf"inside/{name} is a link to another place.*remove it"):
        files.below(place, name, "deeper")
    assert files.below(place, "a", "b").is_dir()


def test_a_folder_that_the_user_named_may_be_reached_through_links(place):
    (place.parent / "mine").symlink_to(place)
    files.replace(files.below(place.parent / "mine", "sub") / "out.json", "mine")
    assert (place / "sub/out.json").read_text() == "mine"


@pytest.mark.parametrize("name", [*LINKS, "folder"])
def test_removing_takes_the_link_alone(place, name):
    files.remove(place / name)
    assert not os.path.lexists(place / name)
    files.remove(place / "absent")


def test_removing_a_folder_leaves_what_its_links_lead_to(place):
    files.remove(place)
    assert not place.exists()


def test_a_guest_may_lay_links_that_stay_inside(place):
    (files.below(place, "guest") / "run").mkdir()
    (place / "guest/latest").symlink_to("run")
    assert files.for_guests(place, "guest") == place / "guest"
    (place / "guest/debug.log").symlink_to("../symbolic")
    with pytest.raises(BurnishError, match=r"debug.log is a link to another place"):
        files.for_guests(place, "guest")


def test_it_imports_no_package_of_others():
    """The control process of a robot has no torch."""
    code = "import burnish.policies.core.files, sys; print(*{'torch', 'numpy', 'yaml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == ""


# ---- nothing writes but through it ----

FILES = "policies.core.files"
# By their names: of `Path`, `os`, `shutil`, `tempfile` and `fcntl`, and of libraries that open paths themselves.
WRITES = re.compile(
    r"write_text|write_bytes|mkdir|makedirs|rmtree|rmdir|removedirs|unlink|renames?|touch|symlink(_to)?|hardlink_to|"
    r"link|chmod|utime|f?truncate|mkfifo|copy[2]?|copyfile|copytree|mkdtemp|mkstemp|(Named)?Temporary(File|Directory)|"
    r"flock|lockf|save_file|write_table|ParquetWriter|SummaryWriter|FileHandler|imwrite|savez(_compressed)?|tofile|memmap"
)
WRITES_AS = {"os.remove", "os.replace", "os.fdopen", "shutil.move", "np.save", "json.dump", "pq.ParquetWriter"}
WRITES_ELSEWHERE: dict[str, set[str]] = {
    # Libraries that open paths themselves, in a folder that was made a moment before, or under a name just made free.
    "policies.runs.checkpoint": {"save_file"},
    "policies.runs.run": {"SummaryWriter"},
    "policies.measure.video": {"open"},
    "policies.cli.storage": {"makedirs", "open"},  # of a storage elsewhere, whose names come from hashes and keys
    "policies.data.lerobot_tables": {"ParquetWriter", "write_table"},
    "policies.data.lerobot_writer": {"write_table"},
    "real_robot.export.exporter": {"TemporaryDirectory"},
    # The memory that a robot's processes share, and an emulated port: a new folder that this user alone can enter.
    "real_robot.control.shared_memory": {"open", "ftruncate", "mkdtemp", "flock", "rmtree"},
    "real_robot.control.link": {"open"},  # the log of a process, in that folder
    "real_robot.control.process": {"truncate"},
    "sim.external.side_planner": {"fdopen"},  # its own standard output
    "real_robot.control.timing": {"save"},
    "real_robot.control.watchdog": {"write_text"},
    "real_robot.emulators.pty": {"TemporaryDirectory", "unlink", "symlink_to"},
}


def writes_through_one_door(module: Module) -> Iterator[str]:
    """A folder may be a stranger's, and hold links where we write; only the functions of FILES know how to."""
    if module.name == FILES:
        return
    for node in nodes(module, ast.Call):
        called, name = ast.unparse(node.func), last_name(node.func)
        if _writes(node, called, name) and name not in WRITES_ELSEWHERE.get(module.name, ()):
            yield f"{node.lineno}: {called} writes, moves, locks or removes a file; use {FILES}"


def _writes(node: ast.Call, called: str, name: str) -> bool:
    if called.startswith("files."):
        return False
    if name == "open":
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [x.value for x in given if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        flags = {x.attr for part in given for x in ast.walk(part) if isinstance(x, ast.Attribute)}
        plain = any(re.fullmatch("[rwaxbt+]{1,4}", mode) and set(mode) & set("wax+") for mode in modes)
        unknown = called == "os.open" and not any(flag.startswith("O_") for flag in flags)
        return plain or unknown or bool(flags & {"O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"})
    if name == "replace" and called != "os.replace":  # of a path; that of a string takes two
        return isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords
    if name in ("copy", "link", "memmap"):  # of tensors and mappings too
        return called in ("shutil.copy", "os.link", "np.memmap")
    return bool(WRITES.fullmatch(name)) or called in WRITES_AS


def test_the_package_writes_through_it_alone():
    found = modules(*FOLDERS)
    assert any(module.name == FILES for module in found), "the tree was not found, so nothing was examined"
    complaints = [f"{module.path}:{said}" for module in found for said in writes_through_one_door(module)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_each_exception_is_needed():
    """A name that is not used any more would let pass what comes next."""
    for module in modules(*FOLDERS):
        calls = [(node, ast.unparse(node.func), last_name(node.func)) for node in nodes(module, ast.Call)]
        found = {call[2] for call in calls if _writes(*call)}
        assert WRITES_ELSEWHERE.get(module.name, set()) <= found, module.name
    assert set(WRITES_ELSEWHERE) <= {module.name for module in modules(*FOLDERS)}


@pytest.mark.parametrize(
    ("path", "source", "complains"),
    [
        ("sim/a.py", "path.write_text('a')", True),
        ("sim/a.py", "open(path, 'a')", True),
        ("sim/a.py", "path.open(mode='w')", True),
        ("sim/a.py", "os.open(path, os.O_RDWR | os.O_NOFOLLOW)", True),
        ("sim/a.py", "flags = os.O_CREAT\nos.open(path, flags)", True),
        ("sim/a.py", "path.replace(other)", True),
        ("sim/a.py", "from shutil import rmtree\nrmtree(path)", True),
        ("sim/a.py", "path.parent.mkdir(exist_ok=True)", True),
        ("sim/a.py", "av.open(path, 'w', format='mp4')", True),
        ("policies/runs/run.py", "SummaryWriter(folder)", False),
        ("policies/runs/run.py", "path.unlink()", True),
        ("policies/core/files.py", "path.unlink()", False),
        ("sim/a.py", "open(path)\nopen(path, 'rb')\npath.open(encoding='utf-8')", False),
        ("sim/a.py", "'a'.replace('b', 'c')\nreplace(config, out=1)\nx.copy()", False),
        ("sim/a.py", "files.replace(path, text)\nfiles.below(path, 'a')", False),
    ],
)
def test_the_rule_can_fail(path, source, complains):
    assert bool(list(writes_through_one_door(Module(path, source)))) == complains
