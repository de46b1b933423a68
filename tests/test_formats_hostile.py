"""Recordings that a stranger made: each is refused in one sentence, before it costs memory and without another file
being opened."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import demand

import format_lab
from burnish.policies.core.errors import BurnishError
from burnish.policies.data.formats import bounds
from burnish.policies.data.formats.heaps import check_heaps
from burnish.policies.data.read import read_dataset
from format_lab import WRITERS, hdf5

Change = Callable[[Path], Any]


def in_file(change: Callable[[Any], Any]) -> Change:
    def changed(path: Path) -> None:
        with hdf5(path, "a") as file:
            change(file)

    return changed


def other(name: str, make: Callable[[Any], Any]) -> Change:
    """Another array or link under a name that was there."""

    def change(file: Any) -> None:
        del file[name]
        make(file)

    return in_file(change)


def array(name: str, data: Any = None, **options: Any) -> Change:
    return other(name, lambda file: file.create_dataset(name, data=data, **options))


def beside(path: Path) -> Path:
    """Another file, which nothing may open."""
    with hdf5(path / "secret.h5") as file:
        file["x"] = np.ones((5, 2))
    return path / "secret.h5"


def external(path: Path) -> None:
    secret = beside(path.parent)
    array("observations", shape=(9, 2), dtype="f8", external=[(str(secret), 0, 9 * 16)])(path)


def virtual(path: Path) -> None:
    h5py, secret = demand("h5py"), beside(path.parent)
    layout = h5py.VirtualLayout((9, 2), "f8")
    layout[:5] = h5py.VirtualSource(str(secret), "x", (5, 2))
    other("observations", lambda file: file.create_virtual_dataset("observations", layout))(path)


def linked(kind: str, *where: str) -> Change:
    def change(path: Path) -> None:
        beside(path.parent)
        link = getattr(demand("h5py"), kind)(*where)
        other("observations", lambda file: file.__setitem__("observations", link))(path)

    return change


def of_kind(kind: Callable[[Any], Any], row: Any = None) -> Change:
    def make(file: Any) -> None:
        made = file.create_dataset("observations", (9,), kind(demand("h5py")))
        for i in range(0 if row is None else 9):
            made[i] = row

    return other("observations", make)


def adding(**arrays: Any) -> Change:
    """More observations of an episode."""
    return in_file(lambda file: [file["data/demo_9/obs"].__setitem__(name, x) for name, x in arrays.items()])


def chunked(chunks: tuple[int, ...], content: bytes | None = None, **options: Any) -> Change:
    """Observations in chunks, of which the first holds these bytes."""

    def make(file: Any) -> None:
        made = file.create_dataset("observations", dtype="f8", chunks=chunks, **options)
        if content is not None:
            made.id.write_direct_chunk((0, 0), content)

    return other("observations", make)


def heap(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"GCOL\x01")
    while content[at + 16 : at + 18] != b"\0\0":  # up to the free space at its end
        size = int.from_bytes(content[at + 24 : at + 32], "little")
        at += 16 + (size + 7) // 8 * 8
    content[at + 24 : at + 32] = bytes(8)
    path.write_bytes(content)


def value(name: str, where: Any, number: float) -> Change:
    return in_file(lambda file: file[name].__setitem__(where, number))


BOMB, GZIP = zlib.compress(bytes(1 << 24), 1), {"compression": "gzip"}
HDF5: dict[str, tuple[str, Change, str]] = {
    "external link": ("d4rl", linked("ExternalLink", "secret.h5", "/x"), "'observations' as a link to another place"),
    "soft link": ("d4rl", linked("SoftLink", "/actions"), "'observations' as a link to another place"),
    "external storage": ("d4rl", external, "'/observations' in other files"),
    "virtual": ("d4rl", virtual, "'/observations' in other files"),
    "text": ("d4rl", of_kind(lambda h5py: h5py.string_dtype(), "a"), "plain numbers are read only"),
    "rows of bytes": ("d4rl", of_kind(lambda h5py: h5py.vlen_dtype(np.uint8), np.zeros(2, np.uint8)), "plain numbers"),
    "references": ("d4rl", of_kind(lambda h5py: h5py.ref_dtype), "without values"),
    "records": ("d4rl", array("observations", np.zeros(9, [("x", "f4")])), "plain numbers are read only"),
    "complex": ("d4rl", array("observations", np.zeros((9, 2), np.complex64)), "plain numbers are read only"),
    "long double": ("d4rl", array("observations", np.zeros((9, 2), np.longdouble)), "plain numbers are read only"),
    "nothing": ("d4rl", array("observations", shape=None, dtype="f4"), ""),
    "one number": ("d4rl", array("rewards", 1.0), "'/rewards' of shape ()"),
    "values that are not there": ("d4rl", chunked((9, 9), shape=(9, 1 << 40)), "without values"),
    "more than it can hold": ("d4rl", chunked((9, 9), bytes(648), shape=(9, 1 << 30)), "which its size cannot hold"),
    "large chunks": ("d4rl", chunked((1 << 20, 32), b"x", shape=(9, 2), maxshape=(None, 32), **GZIP), "in chunks of"),
    "chunk that unpacks": ("d4rl", chunked((9, 64), BOMB, shape=(9, 64), **GZIP), "more than its 4608 bytes"),
    "plug-in": ("d4rl", array("observations", np.zeros((9, 2)), compression="lzf"), "packed with filter 32000"),
    "NaN": ("d4rl", value("observations", (2, 0), np.nan), "episode 0 of"),
    "infinite": ("d4rl", value("observations", (8, 0), 1e300), "an infinite value in 'state'"),
    "NaN among rewards": ("d4rl", value("rewards", 4, np.nan), "NaN in 'reward'"),
    "NaN among ends": ("d4rl", array("terminals", np.full(9, np.nan)), "other values than 0 and 1 in 'terminals'"),
    "fewer rows": ("d4rl", array("rewards", np.zeros(8)), "'/rewards' of shape (8,), but actions of 9 rows"),
    "actions that choose": ("d4rl", array("actions", np.zeros(9, np.int64)), "policies here act in real numbers"),
    "a group of actions": ("d4rl", other("actions", lambda f: f.create_group("actions")), "has no array 'actions'"),
    "mixed shapes": ("maniskill", array("traj_1/obs/agent/qpos", np.zeros((3, 7))), "episode 1 of"),
    "shapes of the next": ("robomimic", array("data/demo_10/next_obs/a", np.zeros((2, 3))), "that follow an action"),
    "mixed names": ("robomimic", in_file(lambda f: f.move("data/demo_10/obs/a", "data/demo_10/obs/c")), "episode 1"),
    "mixed actions": ("robomimic", array("data/demo_10/actions", np.zeros((2, 3))), "other names, shapes or types"),
    "no actions": ("robomimic", array("data/demo_10/actions", np.zeros((0, 2))), "episode 1 of"),
    "lengths": ("robomimic", array("data/demo_10/obs/b", np.zeros((7, 1), np.float32)), "observations of [3, 8] rows"),
    "a ring of groups": ("robomimic", in_file(lambda f: f["data/demo_9/obs"].__setitem__("r", f["data"])), "nested"),
    "climbing name": ("robomimic", adding(**{"..": np.zeros((4, 1))}), "could lead elsewhere"),
    "name for a terminal": ("robomimic", adding(**{"\x1b[2J": np.zeros((4, 1))}), r"\x1b[2J"),
    "twice one name": ("robomimic", adding(**dict.fromkeys(("x.y", "x/y"), np.zeros((4, 1)))), "both be called 'x.y'"),
    "many arrays": ("robomimic", adding(**{f"k{i}": np.zeros(4) for i in range(300)}), "more than 256 arrays"),
    "rewards in a row": ("robomimic", array("data/demo_10/rewards", np.zeros((1, 2))), "rewards of shape (1, 2)"),
    "no observations": ("robomimic", in_file(lambda f: f.__delitem__("data/demo_9/obs")), "dataset_states_to_obs.py"),
    "a list of texts": ("robomimic", in_file(lambda f: f["data"].attrs.__setitem__("env_args", [0, 1])), "many values"),
    "a mask of numbers": ("robomimic", array("mask/train", np.zeros(3)), "instead of a list of names"),
    "a heap without an end": ("robomimic", heap, "cannot be read to its end"),
    "states alone": ("maniskill", in_file(lambda f: f.__delitem__("traj_0/obs")), "mani_skill.trajectory."),
}  # fmt: skip


def refused(path: Path) -> str:
    """The one sentence, which names the dataset."""
    with pytest.raises(BurnishError) as caught:
        read_dataset(path)
    said = str(caught.value)
    assert "\n" not in said and "\x1b" not in said and str(path) in said
    return said


@pytest.mark.parametrize("case", HDF5)
def test_a_hostile_hdf5_file_is_refused(case, tmp_path):
    name, change, said = HDF5[case]
    path = WRITERS[name](tmp_path)
    read_dataset(path)  # the control
    change(path)
    assert said in refused(path)


def test_a_heap_is_sound_until_it_is_changed(tmp_path):
    """HDF5 itself would read the changed one for ever, so it cannot be the control."""
    path = WRITERS["robomimic"](tmp_path)
    check_heaps(path)
    heap(path)
    with pytest.raises(BurnishError):
        check_heaps(path)


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_larger_than_memory_is_refused(name, tmp_path, monkeypatch):
    path = WRITERS[name](tmp_path)
    monkeypatch.setattr(bounds, "memory", lambda: 1 << 16)
    read_dataset(path)  # the control
    monkeypatch.setattr(bounds, "memory", lambda: 200)
    assert "more than half of the" in refused(path) and "a part of it as a file of its own" in refused(path)


@pytest.mark.parametrize("name", ["robomimic", "minari", "maniskill", "d4rl", "ogbench", "npz"])
def test_a_file_that_was_cut_short_is_refused(name, tmp_path):
    path = WRITERS[name](tmp_path)
    data = path / "data/main_data.hdf5" if path.is_dir() else path
    whole = data.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100):
        data.write_bytes(whole[:size])
        assert refused(path)


# ---- Minari and ManiSkill: what their JSON says ----


def metadata(**changes: Any) -> Change:
    def change(path: Path) -> None:
        file = path / "data/metadata.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def in_data(change: Change) -> Change:
    return lambda path: change(path / "data/main_data.hdf5")


def frame(content: bytes) -> Change:
    return in_data(value("episode_1/observations/top", 1, np.frombuffer(content, np.uint8)))


DISCRETE = json.dumps({"type": "Discrete", "n": 4})
HUGE = {"type": "Box", "dtype": "uint8", "shape": [1 << 20, 1 << 20, 3]}
MINARI: dict[str, tuple[Change, str]] = {
    "another container": (metadata(data_format="arrow"), "data_format='hdf5'"),
    "actions that choose": (metadata(action_space=DISCRETE), "actions of kind 'Discrete'"),
    "pictures that are huge": (metadata(observation_space=json.dumps(HUGE)), "bytes, and"),
    "nested JSON": (lambda path: (path / "data/metadata.json").write_text("[" * 100_000), "is malformed"),
    "no data": (lambda path: (path / "data/main_data.hdf5").unlink(), "is no file"),
    "data that is a folder": (
        lambda path: [(path / "data/main_data.hdf5").unlink(), (path / "data/main_data.hdf5").mkdir()], "is no file"
    ),
    "no picture": (frame(b"no picture"), "no readable image in row 1"),
    "another picture": (frame(format_lab.jpeg(np.zeros((60, 50, 3), np.uint8))), "instead of (5, 6) pixels"),
    "a picture that is too long": (frame(bytes(1 << 17)), "an image of 131072 bytes instead of"),
    "one column is missing": (in_data(in_file(lambda f: f.__delitem__("episode_1/rewards"))), "has no 'rewards'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MINARI)
def test_a_hostile_folder_of_minari_is_refused(case, tmp_path):
    path = WRITERS["minari"](tmp_path)
    read_dataset(path)  # the control
    change, said = MINARI[case]
    change(path)
    assert said in refused(path)


@pytest.mark.parametrize("text", ['{"env_spec": "[[[["}', '{"action_space": {"low": "x"}}', '{"observation_space": 5}'])
def test_minari_s_json_may_say_less(text, tmp_path):
    """Then pictures are not unpacked, and the limits are those of the data."""
    path = WRITERS["minari"](tmp_path)
    in_data(in_file(lambda file: [file[f"episode_{i}/observations"].__delitem__("top") for i in range(3)]))(path)
    (path / "data/metadata.json").write_text(text)
    assert len(read_dataset(path)) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [("[" * 100_000, "is malformed"), ('{"episodes": [{"control_mode": "a"}, {"control_mode": "b"}]}', "modes a, b")],
)
def test_hostile_json_beside_maniskill_s_file_is_refused(text, said, tmp_path):
    path = WRITERS["maniskill"](tmp_path)
    path.with_suffix(".json").write_text(text)
    with pytest.raises(BurnishError, match=said):
        read_dataset(path)
    path.with_suffix(".json").write_text('{"env_info": 5, "episodes": [[], {"episode_id": [], "episode_seed": {}}]}')
    assert read_dataset(path).control_hz is None, "the control: nonsense that says nothing"


# ---- npz ----


def rewritten(**changes: Any) -> Change:
    def change(path: Path) -> None:
        with np.load(path) as file:
            kept = {key: file[key] for key in file}
        np.savez(path, **{**kept, **changes})

    return change


def member(name: str, content: bytes, how: int = zipfile.ZIP_STORED) -> Change:
    def change(path: Path) -> None:
        with zipfile.ZipFile(path, "a", how) as archive:
            archive.writestr(name, content)

    return change


def npy(shape: str = "(9, 2)", kind: str = "'<f4'", content: bytes = b"") -> bytes:
    """A file of numpy's format whose header says anything."""
    head = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}".encode()
    head += b" " * (63 - (len(head) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + content


def only(name: str, content: bytes) -> Change:
    """A member of another content."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            kept = {x: archive.read(x) for x in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for x, old in kept.items():
                archive.writestr(x, content if x == name else old)

    return change


def encrypted(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)


class Payload:
    def __reduce__(self) -> Any:
        return (Path("CANARY").touch, ())


NPZ: dict[str, tuple[Change, str]] = {
    "pickle": (rewritten(rewards=np.array([Payload()] * 9)), "stored as pickles and never read"),
    "more than there is": (only("rewards.npy", npy("(9, 1099511627776)")), "which its size cannot hold"),
    "less than it says": (only("rewards.npy", npy("(9,)")), "is damaged or truncated"),
    "negative": (only("rewards.npy", npy("(-9,)")), ""),
    "a header that computes": (only("rewards.npy", npy("(9 ** 9 ** 9,)")), "is damaged or truncated"),
    "no array": (member("notes.txt", b"hello"), "which is no array or there twice"),
    "no header": (member("x.npy", b"hello"), "is damaged or truncated"),
    "twice": (member("actions.npy", npy()), "which is no array or there twice"),
    "climbing": (member("../../x.npy", npy()), "could lead elsewhere"),
    "absolute": (member("/x.npy", npy()), "could lead elsewhere"),
    "packed by bzip2": (member("x.npy", npy(), zipfile.ZIP_BZIP2), "packed otherwise"),
    "encrypted": (encrypted, "packed otherwise"),
    "many": (rewritten(**{f"x{i}": np.zeros(1) for i in range(300)}), "arrays, and 256 are read at most"),
    "text": (rewritten(rewards=np.array(["a"] * 9)), "plain numbers are read only"),
    "dates": (rewritten(rewards=np.zeros(9, "M8[s]")), "plain numbers are read only"),
    "NaN": (rewritten(actions=np.full((9, 2), np.nan)), "NaN in 'action'"),
    "axes": (rewritten(**{"observations/a": np.zeros((9, *[1] * 9))}), "axes are read at most"),
    "one action": (rewritten(actions=np.float32(1)), "a single number as 'actions', and an array of shape (N, A)"),
    "two numbers in a row": (rewritten(rewards=np.zeros((9, 2))), "one number in each row is needed"),
    "no ends": (rewritten(terminated=np.zeros(9), truncated=np.full(9, 2)), "other values than 0 and 1"),
    "ends that fall": (rewritten(episode_ends=np.array([6, 4, 9])), "episode_ends that do not rise"),
    "ends beyond": (rewritten(episode_ends=np.array([4, 6, 10])), "episode_ends that do not rise"),
    "ends that are no numbers": (rewritten(episode_ends=np.array(["a"])), "a list of whole numbers is needed"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", NPZ)
def test_a_hostile_npz_file_is_refused(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = WRITERS["npz"](tmp_path)
    read_dataset(path)  # the control
    change, said = NPZ[case]
    change(path)
    assert said in refused(path)
    assert not Path("CANARY").exists()


def test_a_pickle_in_an_npz_would_have_run(tmp_path, monkeypatch):
    """The control of the canary."""
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "x.npz", x=np.array([Payload()]))
    with np.load(tmp_path / "x.npz", allow_pickle=True) as file:
        _ = file["x"]
    assert Path("CANARY").exists()
