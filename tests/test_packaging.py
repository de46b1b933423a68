"""The wheel holds exactly the tree: setuptools drops a package that is not listed, and says nothing.

Each check is a function of (what pyproject says, what the tree holds), so that a copied list with a fault in it shows
that the check can fail.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "sim", "finetune", "offline", "real_robot", "configs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LISTED: list[str] = PROJECT["tool"]["setuptools"]["packages"]
MAPPED: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
DATA: dict[str, list[str]] = PROJECT["tool"]["setuptools"]["package-data"]


def packages_of_the_tree() -> set[str]:
    """Every folder that holds Python files, and nothing that only Python itself wrote."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return {".".join(["burnish", *file.parent.relative_to(ROOT).parts]) for file in files}


def package_faults(listed: Iterable[str], mapped: Mapping[str, str], tree: set[str]) -> list[str]:
    listed = list(listed)
    faults = [f"{name} is in the tree, but not in the list" for name in sorted(tree - set(listed))]
    faults += [f"{name} is in the list, but not in the tree" for name in sorted(set(listed) - tree)]
    faults += [f"{name} is listed twice" for name in sorted({name for name in listed if listed.count(name) > 1})]
    for name in listed:
        # Setuptools looks up the longest mapped parent; all of ours are mapped at their top folder.
        top = ".".join(name.split(".")[:2])
        if not name.startswith("burnish."):
            faults.append(f"{name} would be installed outside the namespace")
        elif mapped.get(top) != top.removeprefix("burnish."):
            faults.append(f"{top} is not mapped onto its folder")
    return faults


def test_the_list_of_packages_is_the_tree():
    assert package_faults(LISTED, MAPPED, packages_of_the_tree()) == []


@pytest.mark.parametrize("package", sorted(LISTED))
def test_a_package_that_is_not_listed_is_noticed(package: str):
    without = [name for name in LISTED if name != package]
    assert f"{package} is in the tree, but not in the list" in package_faults(without, MAPPED, packages_of_the_tree())


def test_other_faults_of_the_list_are_noticed():
    tree = set(LISTED)
    assert package_faults(LISTED, MAPPED, tree) == []
    assert package_faults(LISTED, MAPPED, tree | {"burnish.sim.new"})
    assert package_faults([*LISTED, "burnish.ghost"], MAPPED, tree)
    assert package_faults([*LISTED, "burnish.sim"], MAPPED, tree)
    assert package_faults([*LISTED, "tests"], MAPPED, tree | {"tests"})
    assert package_faults(LISTED, {**MAPPED, "burnish.sim": "policies"}, tree)


def test_each_package_is_a_real_one_and_the_namespace_is_not():
    """``burnish`` is shared (PEP 420); below it a folder without ``__init__`` would be open to strangers as well."""
    folders = [ROOT / Path(*name.split(".")[1:]) for name in LISTED]
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_data_files_are_shipped():
    assert [folder for folder in FOLDERS if not (ROOT / folder / "py.typed").is_file()] == []
    configs = ROOT / "configs"
    shipped = {file for pattern in DATA["burnish.configs"] for file in configs.glob(pattern)}
    assert {*configs.rglob("*.yaml"), *configs.rglob("*.yml")} <= shipped
    assert "py.typed" in DATA["*"]


def test_the_licence_is_whole():
    """Apache-2.0, 201 lines of text after its empty first one, with the name of the owner filled in."""
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["project"]["license"] == "Apache-2.0" and PROJECT["project"]["license-files"] == ["LICENSE"]
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text and len(text.splitlines()) > 200
    assert "[yyyy]" not in text and "[name of copyright owner]" not in text


def test_a_folder_imported_as_the_root_explains_itself():
    for folder in FOLDERS:
        if folder != "configs":
            child = [sys.executable, "-c", f"import {folder}"]
            run = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=False)
            assert run.returncode == 1 and f"write `import burnish.{folder}`" in run.stderr, run.stderr


def canonical(name: str) -> str:
    """PEP 503: one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(requirement: str) -> str:
    return canonical(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def foreign_imports(folders: Iterable[str]) -> dict[str, str]:
    """Top-level name of each import that is neither ours nor Python's -> a file that imports it."""
    found = {}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found |= {name.split(".")[0]: str(file.relative_to(ROOT)) for name in names}
    scripts = {file.stem for file in files if file.parent.name in ("tests", "benchmarks")}
    scripts |= {file.parent.name for file in files if file.name == "__init__.py"}
    known = {*sys.stdlib_module_names, "burnish", *scripts}
    return {name: file for name, file in found.items() if name not in known}


# Modules of one compiled file each, which importlib.metadata does not see.
COMPILED = {"rtde_control": ["ur-rtde"], "rtde_receive": ["ur-rtde"]}


def undeclared(imports: Mapping[str, str], declared: set[str]) -> list[str]:
    """Imports that no declared requirement provides: they would work here by the luck of somebody else's dependency."""
    providers = {**importlib.metadata.packages_distributions(), **COMPILED}
    faults = []
    for name, file in sorted(imports.items()):
        if declared.isdisjoint(canonical(distribution) for distribution in providers.get(name, [name])):
            faults.append(f"{file} imports {name}, which pyproject.toml does not require")
    return faults


def requirements(*extras: str) -> set[str]:
    optional = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {distribution_of(line) for line in lines}


@pytest.mark.slow
def test_what_is_imported_is_required():
    everything = requirements(*PROJECT["project"]["optional-dependencies"])
    # Installed without their requirements (extra worlds), and packages that live in another Python only.
    apart = {"metaworld", "robosuite", "libero", "mplib", "lerobot", "torchvision", "transformers"}
    product = requirements("hdf5", "hub", "maniskill", "robots", "sb3", "serve", "vla", "worlds") | apart
    assert undeclared(foreign_imports(FOLDERS), product) == []
    assert undeclared(foreign_imports(["tests", "benchmarks"]), everything | apart) == []
    assert undeclared({"sympy": "sim/a.py"}, everything), "sympy comes with torch only, so importing it must be noticed"


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def test_the_constraints_pin_every_requirement():
    assert all(re.fullmatch(r"[\w.!]+", version) for version in pins().values()), "each line is NAME==VERSION"
    assert pins()["torch"] == "2.13.0" and pins()["mujoco"] == "3.8.1"
    assert "torchvision" not in pins()
    tested = requirements("test", "dev") - {"burnish"}
    assert tested - set(pins()) == set()


def promised(*extras: str) -> dict[str, SpecifierSet]:
    """Distribution -> the versions that pyproject.toml admits, of all that are required with these extras."""
    optional = PROJECT["project"]["optional-dependencies"]
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {canonical(found.name): found.specifier for found in map(Requirement, lines)}


def lower_end(versions: SpecifierSet) -> Version:
    return max(Version(each.version) for each in versions if each.operator in (">=", "=="))


def test_the_lowest_versions_that_are_promised_are_those_that_are_tried():
    tried = {name: Version(version) for name, version in pins("constraints-lowest.txt").items()}
    ends = {name: lower_end(versions) for name, versions in promised().items()}
    assert ends.pop("torch") <= Version(pins()["torch"]), "the builds of older ones are too large for CI"
    assert ends == tried


def test_warp_has_the_versions_that_are_known_to_fit():
    """mujoco-warp goes by the version of mujoco, and warp-lang 1.19 does not compile it."""
    ours = promised("warp")
    for name, next_one in (("mujoco-warp", "3.9.0"), ("warp-lang", "1.19.0")):
        assert pins()[name] in ours[name] and next_one not in ours[name]


# The ranges of LeRobot that meet ours, from the metadata of its wheels on PyPI (Requires-Dist; that of NumPy for 0.4.4
# from its opencv-python-headless 4.12), with the extras dataset, training, viz, diffusion, feetech, dynamixel, pusht.
# 0.4.4 is the newest for Python 3.11, and 0.6.1 for 3.12 and 3.13.
LEROBOT = {
    "0.4.4": "torch>=2.2.1,<2.11 numpy>=2,<2.3 diffusers>=0.27.2,<0.36 av>=15,<16 gymnasium>=1.1.1,<2 "
    "wandb>=0.24,<0.25 rerun-sdk>=0.24,<0.27 pyserial>=3.5,<4 opencv-python-headless>=4.9,<4.13 termcolor>=2.4,<4 "
    "gym-pusht>=0.1.5,<0.2 feetech-servo-sdk>=1,<2 dynamixel-sdk>=3.7.31,<3.9 huggingface-hub>=0.34.2,<0.36",
    "0.6.1": "torch>=2.7,<2.12 numpy>=2,<2.3 diffusers>=0.38,<0.40 av>=15,<16 gymnasium>=1.1.1,<2 "
    "wandb>=0.24,<0.28 rerun-sdk>=0.24,<0.34 pyserial>=3.5,<4 opencv-python-headless>=4.9,<4.14 termcolor>=2.4,<4 "
    "gym-pusht>=0.1.5,<0.2 feetech-servo-sdk>=1,<2 dynamixel-sdk>=3.7.31,<3.9 pillow>=10,<13 safetensors>=0.4.3,<1 "
    "tqdm>=4.66,<5 pyarrow>=21,<30 huggingface-hub>=1.6,<2",
}


def meet(one: SpecifierSet, two: SpecifierSet) -> bool:
    """Of ranges that are open above or end below a version, the larger of the lower ends lies in both, if anything."""
    end = max(lower_end(one), lower_end(two))
    return end in one and end in two


@pytest.mark.parametrize("version", LEROBOT)
def test_the_ranges_meet_those_of_lerobot(version: str):
    ours = promised("hub", "robots", "wandb", "rerun", "worlds")
    theirs = {canonical(found.name): found.specifier for found in map(Requirement, LEROBOT[version].split())}
    assert len(theirs) >= 13 and set(theirs) <= set(ours)
    assert [name for name, versions in theirs.items() if not meet(ours[name], versions)] == []


def test_ranges_that_do_not_meet_are_noticed():
    assert not meet(SpecifierSet(">=0.31"), SpecifierSet(">=0.24,<0.25"))
    assert not meet(SpecifierSet(">=1,<2"), SpecifierSet(">=2"))
    assert meet(SpecifierSet(">=2.8"), SpecifierSet(">=2.2.1,<2.11"))


def test_the_page_on_the_index_is_complete():
    project = PROJECT["project"]
    assert project["readme"] == {"file": "README.md", "content-type": "text/markdown"}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(project["classifiers"])
    assert not any(each.startswith("License ::") for each in project["classifiers"]), "license says it (PEP 639)"
    assert len(project["description"]) < 512 and project["keywords"] and project["authors"]


def test_the_tested_set_is_the_pinned_set():
    """Whoever tests with other versions may; CI may not, and no package may come in without a pin.

    The libraries of a CUDA build of torch are left out: torch pins them itself.
    """
    if not os.environ.get("BURNISH_CI"):
        pytest.skip("only CI must hold exactly the pinned versions")
    # Once something imports setuptools, the copies that it carries along are on the path too; they are not installed.
    path = [entry for entry in sys.path if not entry.endswith("_vendor")]
    found = importlib.metadata.distributions(path=path)
    installed = {canonical(dist.name): dist.version.split("+")[0] for dist in found}
    excused = re.compile(r"burnish|pip|triton|(nvidia|cuda)-.*")
    ours = {name: version for name, version in installed.items() if not excused.fullmatch(name)}
    assert {name: version for name, version in ours.items() if pins().get(name) != version} == {}
