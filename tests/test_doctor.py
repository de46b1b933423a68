"""The doctor's report, and each of its probes on a machine that lacks the thing."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from burnish.policies.cli import doctor as module
from burnish.policies.cli.doctor import Finding


def test_only_required_things_set_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    present, optional = Finding("disk", True, "enough"), Finding("gpu", None, "none", "buy one")
    monkeypatch.setattr(module, "examine", lambda: [present, optional])
    assert module.doctor() == 0
    text = capsys.readouterr().out
    assert "nothing required is missing" in text and "> buy one" in text

    monkeypatch.setattr(module, "examine", lambda: [present, optional, Finding("torch", False, "broken", "mend it")])
    assert module.doctor() == 1
    text = capsys.readouterr().out
    assert "required and missing: torch" in text and "> mend it" in text


def test_advice_stands_under_its_finding():
    advice = "do this " * 40
    lines = module.report([Finding("a", None, "x", advice), Finding("bbb", True, "y")]).splitlines()
    assert lines[0].startswith("absent") and lines[-2].startswith("ok")
    assert " ".join(" ".join(lines[1:-2]).split()) == "> " + advice.strip()
    assert all(len(line) <= 110 for line in lines)


def test_this_machine_has_what_is_required():
    """The tests run here, so nothing that is required can be missing."""
    findings = {probe.name: probe for probe in (module.python(), module.packages(), module.torch(), module.ffmpeg())}
    assert {name for name, finding in findings.items() if finding.ok is False} == set()
    assert importlib.metadata.version("torch") in findings["torch"].detail


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert module.python().ok is False


@pytest.mark.parametrize(
    ("probe", "hidden", "ok"), [("torch", "torch", False), ("gpu", "torch", None), ("ffmpeg", "av", False)]
)
def test_a_missing_module_is_a_finding_with_advice(
    monkeypatch: pytest.MonkeyPatch, probe: str, hidden: str, ok: bool | None
):
    monkeypatch.setitem(sys.modules, hidden, None)  # Now `import hidden` raises ImportError.
    finding = getattr(module, probe)()
    assert finding.ok is ok and finding.advice


def test_missing_distributions_are_named_and_extras_are_not(monkeypatch: pytest.MonkeyPatch):
    wanted = ["numpy>=2.0", "no-such.thing>=3", 'absent-extra; extra == "sb3"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    finding = module.packages()
    assert finding.ok is False
    assert finding.detail == "missing: no-such.thing" and finding.advice == "run `pip install no-such.thing`"


def test_a_renderer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_RENDER", "raise OSError('no display here')")
    assert module.draw("egl") == "OSError: no display here"
    monkeypatch.setattr(module, "_RENDER", "import os; os.abort()")
    assert "status" in str(module.draw("egl"))
    monkeypatch.setattr(module, "_RENDER", "import time; time.sleep(30)")
    assert module.draw("egl", timeout_s=0.2) == "no image after 0 s"


def test_the_first_renderer_that_works_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(module, "draw", lambda backend: 1.5 if backend == "osmesa" else "no")
    finding = module.rendering()
    assert finding.ok is True and finding.detail.startswith("osmesa") and not finding.advice

    # What the user chose is tried first; if it works it needs no advice, and if another works it is in the way.
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert "MUJOCO_GL=glfw" in module.rendering().advice
    monkeypatch.setattr(module, "draw", lambda backend: 1.5)
    assert module.rendering() == Finding("rendering", True, "glfw draws a 32x32 image in 1.5 ms")

    monkeypatch.setattr(module, "draw", lambda backend: "no")
    finding = module.rendering()
    assert finding.ok is None and finding.detail == "glfw: no; egl: no; osmesa: no" and finding.advice


def test_vulkan_needs_a_loader_and_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(module, "mesa", lambda: "25.0.7-2~bpo12+1")
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: None)
    finding = module.vulkan([str(tmp_path)])
    assert finding.ok is None and finding.detail == "no loader and no driver"
    assert "libvulkan1 mesa-vulkan-drivers" in finding.advice

    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: "libvulkan.so.1")
    assert module.vulkan([str(tmp_path)]).detail == "no driver"

    (tmp_path / "intel_icd.x86_64.json").write_text("{}")
    finding = module.vulkan([str(tmp_path)])
    assert finding.ok is None and "lavapipe" in finding.advice


@pytest.mark.parametrize(
    ("version", "ok"), [("25.0.7-2~bpo12+1", True), ("24.3.0-1", True), ("24.2.8-1", None), ("22.3.6-1", None)]
)
def test_lavapipe_draws_for_maniskill_since_mesa_24_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, ok: bool | None
):
    monkeypatch.setattr(module, "mesa", lambda: version)
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: "libvulkan.so.1")
    (tmp_path / "lvp_icd.x86_64.json").write_text("{}")
    finding = module.vulkan([str(tmp_path)])
    assert finding.ok is ok and f"Mesa {version}" in finding.detail and bool(finding.advice) == (ok is None)

    (tmp_path / "nvidia_icd.json").write_text("{}")  # draws whatever Mesa is
    assert module.vulkan([str(tmp_path)]).ok is True


def test_a_system_without_debian_packages_tells_no_version_of_mesa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module.ctypes.util, "find_library", lambda name: "libvulkan.so.1")
    (tmp_path / "lvp_icd.x86_64.json").write_text("{}")
    assert module.mesa() is None
    finding = module.vulkan([str(tmp_path)])
    assert finding.ok is True and "Mesa" not in finding.detail


def test_a_small_disk_is_advised_against_but_not_refused(tmp_path: Path):
    assert module.disk(tmp_path, needed_gb=0.0).ok is True
    finding = module.disk(tmp_path, needed_gb=1e9)
    assert finding.ok is None and finding.advice


@pytest.mark.sim
def test_mujoco_draws_without_a_screen(require):
    """Through EGL or OSMesa, whichever is there; ``draw`` itself refuses a blank image."""
    reasons = []
    for backend in ("egl", "osmesa"):
        result = module.draw(backend)
        if isinstance(result, float):
            assert result > 0
            return
        reasons.append(f"{backend}: {result}")
    require(False, "no renderer without a screen: " + "; ".join(reasons))
