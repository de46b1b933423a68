"""Tasks do not change under the same version: what numbers were measured on is what stands."""

import pytest

from burnish.sim import frozen
from burnish.sim.experts import SCRIPTED

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_task_is_what_was_frozen_under_its_version(name):
    assert frozen.changed(name) is None


@pytest.mark.parametrize("part", ["mjcf", "config", "spec", "experts", "recipe", "variants"])
def test_a_change_of_any_part_is_noticed(part, monkeypatch):
    made = frozen.contents("reach")
    monkeypatch.setattr(frozen, "contents", lambda name: {**made, part: "another"})
    assert "raise its version" in (frozen.changed("reach") or "")


def test_what_a_version_was_is_never_overwritten(monkeypatch, tmp_path, capsys):
    table = tmp_path / "frozen.json"
    table.write_text('{"reach": {"1": "0"}}')
    monkeypatch.setattr(frozen, "TABLE", table)
    monkeypatch.setattr(frozen, "SCRIPTED", ("reach",))
    assert frozen.main() == 2 and "raise its version" in capsys.readouterr().err
    assert frozen.frozen() == {"reach": {"1": "0"}}


def test_a_new_version_is_added(monkeypatch, tmp_path):
    table = tmp_path / "frozen.json"
    table.write_text('{"reach": {"0": "0"}}')
    monkeypatch.setattr(frozen, "TABLE", table)
    monkeypatch.setattr(frozen, "SCRIPTED", ("reach",))
    assert frozen.main() == 0
    version, found = frozen.fingerprint("reach")
    assert frozen.frozen() == {"reach": {"0": "0", version: found}}
