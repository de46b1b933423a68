"""Checkpoints: bits come back, and every defect is one sentence that names the file."""

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.runs import manifest
from burnish.policies.runs.checkpoint import load, newest, number, numbered, prune, save

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
]


def same(a, b) -> bool:
    """Equal types, shapes and bits: NaN equals NaN, 0.0 differs from -0.0, a tuple differs from a list."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(b.contiguous().reshape(-1).view(torch.uint8))
        )
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def round_trip(folder: Path, state: dict) -> dict:
    return load(save(folder / "c", config={}, state=state)).state


def training(folder: Path, step: int = 7) -> Path:
    policy = {"config": {"kind": "flow", "width": 64}, "state": {"net.0.weight": torch.randn(3, 4)}}
    learner = {"config": {}, "state": {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "updates": step}}
    return save(
        folder,
        config={"seed": 1},
        state={"step": step},
        metrics={"success": 0.5},
        children={"policy": policy, "learner": learner},
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 5)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape):
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8)
    state = {"x": bits.view(dtype).reshape(shape)}
    assert same(round_trip(tmp_path, state), state)


def test_plain_values_and_odd_keys_come_back_exactly(tmp_path):
    state = {
        "numbers": [2**53 + 1, -(2**200), 0.1, -0.0, 1e-320, float("nan"), float("inf"), -float("inf"), True, 1, 1.0],
        "nested": (1, [2, (3,)], {"a": ()}, None, "text", "é\n\x00"),
        0: {"int key": 1, 1: torch.ones(2), None: 2, False: 3},
        "a.b": {"c": torch.zeros(1)},
        "a": {"b.c": torch.ones(1), "b": {"c": torch.full((1,), 2.0)}},
        "a/b": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "": torch.tensor(6),
        "$tensor": "not a reference",
        "$dict": {"$float": "x", "$unknown": [1]},
        "empty": {},
    }
    assert same(round_trip(tmp_path, state), state)
    assert not same({"x": 0.0}, {"x": -0.0}) and not same({"x": (1,)}, {"x": [1]})  # The comparison can fail.


def test_views_and_shared_tensors_come_back_by_value(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    state = {"base": base, "again": base, "transposed": base.t(), "slice": base[1:, ::2], "row": base[1]}
    state |= {"expanded": torch.tensor(2.0).expand(5), "parameter": torch.nn.Parameter(base[0])}
    state |= {"conjugate": torch.complex(base, base).conj()}
    assert same(round_trip(tmp_path, state), {**state, "conjugate": state["conjugate"].resolve_conj()})


def test_loaded_tensors_are_aligned_and_independent(tmp_path):
    loaded = round_trip(tmp_path, {"flag": torch.tensor(True), "x": torch.ones(9), "y": torch.ones(9)})
    loaded["x"].zero_()
    assert loaded["y"].sum() == 9
    assert all(x.data_ptr() % 64 == 0 for x in loaded.values())


def test_optimizer_and_generator_continue_exactly(tmp_path):
    def make():
        net = torch.nn.Linear(4, 4)
        return net, torch.optim.AdamW(net.parameters(), fused=False), torch.Generator()

    def train(net, optimizer, generator):
        optimizer.zero_grad()
        net(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()

    first = make()
    for _ in range(3):
        train(*first)
    net, optimizer, generator = first
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": generator.get_state()}
    saved = save(tmp_path / "c", config={}, state=state)
    train(*first)
    second = make()
    loaded = load(saved).state
    second[0].load_state_dict(loaded["net"])
    second[1].load_state_dict(loaded["optimizer"])
    second[2].set_state(loaded["rng"])
    train(*second)
    assert same(dict(first[0].state_dict()), dict(second[0].state_dict()))
    assert same(first[1].state_dict(), second[1].state_dict())
    assert same(first[2].get_state(), second[2].get_state())


def test_config_comes_back(tmp_path):
    config = {"lr": 1e-5, "big": 1e300, "name": "on", "digits": "012", "none": None, "list": [1, {"a": True}], "é": "ü"}
    assert same(load(save(tmp_path / "c", config=config, state={})).config, config)


def test_children_are_complete_checkpoints_that_can_be_copied_away(tmp_path):
    whole = load(training(tmp_path / "c"))
    assert (
        whole.metrics == {"success": 0.5}
        and whole.state == {"step": 7}
        and list(whole.children) == ["policy", "learner"]
    )
    shutil.copytree(tmp_path / "c" / "policy", tmp_path / "elsewhere")
    alone = load(tmp_path / "elsewhere")
    assert alone.config == {"kind": "flow", "width": 64} and same(alone.state, whole.children["policy"].state)


def test_manifest_records_versions(tmp_path):
    content = json.loads((training(tmp_path / "c") / "manifest.json").read_text())
    assert content["schema"] == manifest.SCHEMA and content["torch"] == str(torch.__version__)
    assert content["burnish"] and "git" in content


def test_nothing_is_pickled(tmp_path):
    for path in training(tmp_path / "c").rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".yaml", ".safetensors")


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", torch.Size([1]), {1.5: 0}, {(1, 2): 0}])
def test_values_that_would_come_back_as_something_else_are_refused(tmp_path, value):
    with pytest.raises(BurnishError, match=r"the state at 'outer\.inner'"):
        save(tmp_path / "c", config={}, state={"outer": {"inner": value}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [{"config": {"x": object()}}, {"metrics": {"x": object()}}])
def test_config_and_metrics_that_are_not_data_are_refused(tmp_path, fields):
    with pytest.raises(BurnishError, match="cannot hold"):
        save(tmp_path / "c", **{"config": {}, "state": {}, **fields})
    assert list(tmp_path.iterdir()) == []


def test_sparse_tensor_is_refused(tmp_path):
    with pytest.raises(BurnishError, match="cannot hold"):
        save(tmp_path / "c", config={}, state={"x": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/b", "", ".", "..", ".hidden", "a\\b", "manifest\n"])
def test_names_of_children_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(BurnishError, match="cannot name a part"):
        save(tmp_path / "in" / "c", config={}, state={}, children={name: {"config": {}, "state": {}}})
    assert list((tmp_path / "in").iterdir()) == [] and [p.name for p in tmp_path.iterdir()] == ["in"]


def test_existing_target_is_refused_unless_it_may_be_overwritten(tmp_path):
    target = training(tmp_path / "c", step=1)
    with pytest.raises(BurnishError, match="exists already"):
        training(target, step=2)
    assert load(target).state == {"step": 1}
    save(target, config={}, state={"step": 3}, overwrite=True)
    assert load(target).state == {"step": 3} and list(tmp_path.iterdir()) == [target]


def test_what_is_not_a_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("irreplaceable")
    with pytest.raises(BurnishError, match="is not a checkpoint"):
        save(tmp_path / "thesis", config={}, state={}, overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "irreplaceable"


FILES = [
    f"{folder}{name}"
    for folder in ("", "policy/", "learner/")
    for name in ("config.yaml", "state.json", "state.safetensors", "manifest.json")
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    return training(tmp_path_factory.mktemp("pristine") / "c")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_refused(tmp_path, pristine, name):
    assert sorted(FILES) == sorted(str(p.relative_to(pristine)) for p in pristine.rglob("*") if p.is_file())
    copy = shutil.copytree(pristine, tmp_path / "c")
    good = (copy / name).read_bytes()
    places = random.Random(name).sample(range(len(good)), min(len(good), 12))
    for place in {0, len(good) - 1, *places}:
        bad = bytearray(good)
        bad[place] ^= 1
        (copy / name).write_bytes(bad)
        with pytest.raises(BurnishError, match=f"^{copy / name} "):
            load(copy)
    (copy / name).write_bytes(good)
    load(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_refused(tmp_path, pristine, name):
    copy = shutil.copytree(pristine, tmp_path / "c")
    good = (copy / name).read_bytes()
    for size in (0, len(good) // 2, len(good) - 1):
        (copy / name).write_bytes(good[:size])
        with pytest.raises(BurnishError, match=str(copy / name)):
            load(copy)
    (copy / name).unlink()
    with pytest.raises(BurnishError, match=f"{(copy / name).parent}.*{Path(name).name}"):
        load(copy)


def forge(folder: Path, change=lambda content: None, **texts: str) -> Path:
    """What an attacker would do: other contents under a manifest that fits them."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    content = json.loads((folder / "manifest.json").read_text())
    for name in content["files"]:
        content["files"][name] = {"size": (folder / name).stat().st_size, "sha256": manifest._sha256(folder / name)}
    change(content)
    (folder / "manifest.json").write_text(manifest._seal(content))
    return folder


@pytest.mark.parametrize(
    ("texts", "blamed"),
    [
        ({"config_yaml": "a: [1"}, "config.yaml"),
        ({"config_yaml": "- 1"}, "config.yaml"),
        ({"config_yaml": "!!python/object/apply:os.system ['true']"}, "config.yaml"),
        ({"state_json": "{"}, "state.json"),
        ({"state_json": "[1]"}, "state.json"),
        ({"state_json": '{"x": {"$tensor": "absent"}}'}, "state.json"),
        ({"state_json": '{"x": {"$tensor": []}}'}, "state.json"),
        ({"state_json": '{"x": {"$call": "os.system"}}'}, "state.json"),
        ({"state_json": '{"x": {"$dict": [[[], 1]]}}'}, "state.json"),
        ({"state_json": '{"x": {"$tuple": 3}}'}, "state.json"),
        ({"state_json": '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"}, "state.json"),
        ({"state_safetensors": "not tensors"}, "state.safetensors"),
    ],
)
def test_malformed_contents_are_refused_even_under_a_fitting_manifest(tmp_path, texts, blamed):
    path = save(tmp_path / "c", config={}, state={})
    load(forge(path))  # The forgery itself is good: what follows is refused for its contents.
    with pytest.raises(BurnishError, match=f"{blamed} is malformed") as caught:
        load(forge(path, **texts))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "policy/../../c", "policy/state.json", "other.bin", "policy"]
)
def test_a_manifest_cannot_point_outside(tmp_path, pristine, name):
    copy = shutil.copytree(pristine, tmp_path / "c")
    (tmp_path / "secret").write_text("secret")
    forge(copy, lambda content: content["files"].update({name: {"size": 6, "sha256": ""}}))
    with pytest.raises(BurnishError, match="cannot be a part"):
        load(copy)


@pytest.mark.parametrize("name", [*FILES, "policy"])
def test_symbolic_links_inside_are_refused(tmp_path, pristine, name):
    copy = shutil.copytree(pristine, tmp_path / "c")
    (copy / name).rename(tmp_path / "moved")
    (copy / name).symlink_to(tmp_path / "moved")
    with pytest.raises(BurnishError, match=f"{copy / name} is a symbolic link"):
        load(copy)


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_unknown_schema_versions_are_refused(tmp_path, version):
    path = forge(save(tmp_path / "c", config={}, state={}), lambda content: content.update(schema=version))
    with pytest.raises(BurnishError, match=r"manifest\.json .*schema version"):
        load(path)


@pytest.mark.parametrize("files", [None, [], {}, {"config.yaml": 1, "state.json": {}, "state.safetensors": {}}])
def test_malformed_manifests_are_refused(tmp_path, files):
    path = forge(save(tmp_path / "c", config={}, state={}), lambda content: content.update(files=files))
    with pytest.raises(BurnishError, match="manifest"):
        load(path)


def test_what_is_not_a_checkpoint_at_all_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(BurnishError, match=f"{path} is not a checkpoint"):
            load(path)


def test_numbered_knows_only_proper_names(tmp_path):
    for name in (
        "00000010",
        "00000009",
        "123456789",
        "9",
        "000000010",
        ".scratch-00000011-1-a",
        "00000012.broken",
        "x",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "00000013").write_text("a file")
    assert [p.name for p in numbered(tmp_path)] == ["00000009", "00000010", "123456789"]
    assert numbered(tmp_path / "absent") == [] and number(1000) == "00001000"


def test_newest_passes_over_a_broken_one_with_a_warning(tmp_path, caplog):
    assert newest(tmp_path) is None
    for step in (1, 2):
        training(tmp_path / number(step), step)
    assert newest(tmp_path).state == {"step": 2}
    (tmp_path / number(2) / "policy" / "state.json").write_text("")
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).state == {"step": 1}
    assert "00000002/policy/state.json" in caplog.text
    assert newest(tmp_path, child="learner").state["updates"] == 2  # The part that is asked for is whole.
    shutil.rmtree(tmp_path / number(1) / "policy")
    with pytest.raises(BurnishError, match="none of the 2 checkpoints"):
        newest(tmp_path)


def test_prune_keeps_the_last_and_clears_scratch(tmp_path):
    for step in range(5):
        save(tmp_path / number(step), config={}, state={"step": step})
    (tmp_path / ".scratch-00000005-1-a").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000003", "00000004", "notes.txt"]
    with pytest.raises(BurnishError, match="keep=0"):
        prune(tmp_path, keep=0)
