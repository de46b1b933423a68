# `make quickstart` shows what Burnish does; `make test` passes all tests. Both make .venv when they need it.
# PYTHON=... chooses the interpreter. Where no CUDA is wanted,
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
# takes the small build of torch.

SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell grep "^torch==" constraints.txt)
MUJOCO_NEXT := mujoco==4.0.0
RAY := ray==2.60.0
LOWEST := $(shell grep -v "^\#" constraints-lowest.txt)
FOLDERS := policies sim finetune offline real_robot configs
# Python compiles what it imports; to compile all of it takes longer than to install it.
INSTALL := -m pip install -q --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv dev quickstart test test-lerobot soak lint docs wheel-venv wheel-smoke test-lowest test-mujoco-next test-ray clean

help: ## this list
	@grep -h -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

# The stamp is younger than what it was made from, so a second `make` installs nothing.
# torch goes first and alone: were it one wish among many, pip might fetch gigabytes of CUDA packages for it.
$(VENV)/stamp: pyproject.toml constraints.txt
	mkdir -p $(VENV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt $(TORCH)
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	$(BIN)/python $(INSTALL) --no-deps -c constraints.txt metaworld robosuite
	touch $@

venv: $(VENV)/stamp ## the tested set of packages in .venv, and Burnish as links to this tree

dev: ## links in .dev/burnish, by which pyright and editors resolve `burnish.*`
	@mkdir -p .dev/burnish
	@for folder in $(FOLDERS); do ln -sfn ../../$$folder .dev/burnish/$$folder; done

quickstart: venv ## a robot that fails, refined until it does not: a few minutes
	$(BIN)/burnish quickstart

# What a file's tests share is made once if one process has the whole file; tests/conftest.py orders the files, quick ones
# first, and xdist would order them otherwise. A robot that is late stops, as it must, so tests of robots on the wall
# clock run alone, when the others are through.
test: venv ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs --durations=25 -m 'not real_time'
	$(BIN)/python -m pytest -rs --durations=10 -m real_time $$(grep -l real_time tests/test_*.py)

# PARTS="guard attack" chooses, PARTS=turn takes a short one, each run another; each part says what it shows, how far it has come, and in the end whether it held.
# LeRobot asks for other packages than ours, 1.9 GB of them.
test-lerobot: venv ## LeRobot itself on what Burnish writes, in an environment of its own
	$(BIN)/burnish policies add lerobot
	BURNISH_TURN=all $(BIN)/python -m pytest -rs tests/test_lerobot_itself.py tests/test_lerobot_side.py -k 'itself or real_one'

soak: venv ## the long versions of the tests that have one: a night (PARTS=... chooses some)
	$(BIN)/python tests/soak.py $(PARTS)

lint: venv dev ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# mkdocs would advertise its successor in every build. Not with --quiet, which would not count the warnings either.
docs: venv ## the documentation in site/, where a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What the wheel asks for, without Burnish: made from a copy of the tree, because `make venv` may write into it meanwhile.
WHEEL := $(VENV)/wheel
$(WHEEL)/stamp: pyproject.toml constraints.txt
	rm -rf $(WHEEL)
	mkdir -p $(VENV)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python $(INSTALL) -c constraints.txt $(TORCH)
	set -e; copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; cp -r pyproject.toml README.md LICENSE $(FOLDERS) $$copy; \
	$(WHEEL)/bin/python $(INSTALL) -c constraints.txt "$$copy[test]"
	touch $@

wheel-venv: $(WHEEL)/stamp

# An old build/lib would put deleted modules into the wheel. The tests are copied out of the tree, where nothing but the
# wheel can be imported as `burnish` (tests/conftest.py checks it). What a wheel can lack are modules and files beside
# them (configurations, models of robots, templates of pages) and packages that it did not ask for: these tests need all.
SMOKE := modules cli build experiments envs frozen plugins collect quickstart report report_parts api readme
wheel-smoke: venv wheel-venv ## build the sdist, from it the wheel, install it into an environment of its own, run there the tests that use all that it holds
	rm -rf build dist
	$(BIN)/python -m build -o dist . >/dev/null
	$(WHEEL)/bin/python -m pip uninstall -q -y burnish
	$(WHEEL)/bin/python $(INSTALL) -c constraints.txt "$$(echo $$PWD/dist/burnish-*.whl)[test]"
	set -e; \
	away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; \
	cp -r tests benchmarks docs pyproject.toml README.md $$away; \
	python=$(abspath $(WHEEL))/bin; cd $$away; \
	$$python/burnish --help >/dev/null; \
	BURNISH_WHEEL=1 $$python/python -m pytest -n 2 -rs -m 'not slow' $(SMOKE:%=tests/test_%.py)

# $(call thin,FOLDER,NAME==VERSION ...,OPTIONS): a thin venv on top of the first, which has all packages from there but
# those that it hides by its own, installed with these options of pip.
define thin
	rm -rf $(1)
	$(BIN)/python -m venv --without-pip $(1)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(BIN)/python -m pip --python $(1)/bin/python install -q --no-compile $(3) $(2)
	$(1)/bin/python -c 'import sys, importlib.metadata as m; \
		assert all(m.version(name) == version for name, _, version in (x.partition("==") for x in sys.argv[1:]))' $(2)
endef

NEXT := $(VENV)/next
test-mujoco-next: venv ## our own code on the next MuJoCo: one file of tests in three, the others the next time
	grep -v '^mujoco==' constraints.txt > $(VENV)/next-constraints.txt
	$(call thin,$(NEXT),$(MUJOCO_NEXT),-c $(VENV)/next-constraints.txt)
	BURNISH_SHARE=3 $(NEXT)/bin/python -m pytest -n 2 -rs -m 'sim and not slow and not real_time'

# The lowest versions that pyproject.toml promises, but for torch. The program imports all modules, records, trains,
# refines, resumes and evaluates; the tests are of what leans on those packages.
LOW := $(VENV)/lowest
LOW_TESTS := modules files checkpoint diffusion lerobot lerobot_video external onnx batch threads
test-lowest: venv ## the lowest versions of the packages that Burnish promises to work with: some fast tests
	$(call thin,$(LOW),$(LOWEST),--no-deps)
	cd $$(mktemp -d) && $(CURDIR)/$(LOW)/bin/python $(CURDIR)/tests/windows_lab.py . 2>/dev/null
	$(LOW)/bin/python -m pytest -n 2 -rs -m 'not slow and not real_time' $(LOW_TESTS:%=tests/test_%.py)

# Ray is large, and `burnish` works without it.
WITH_RAY := $(VENV)/ray
test-ray: venv ## the tests that need Ray, on a cluster of processes: the long ones in turn
	$(call thin,$(WITH_RAY),$(RAY),-c constraints.txt)
	$(WITH_RAY)/bin/python -m pytest -rs tests/test_ray_actors.py tests/test_executors.py

clean: ## everything that make made
	rm -rf $(VENV) .dev build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
