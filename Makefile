# make demo   set up everything and run the main job on real vLLM-Omni, plugin off and on: MAGI-2's exchange, and
#             the engine with a picture at the end of it
# make test   the same set-up, then the whole suite
# make lint   ruff and mypy
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps

export HF_HUB_OFFLINE := 1

.PHONY: demo test lint clean FORCE

demo: $(VENV)/installed
	$(BIN)/python entrypoints/two_worker.py
	$(BIN)/vllm-musa-headpar bench --layer --nproc 2
	$(BIN)/python entrypoints/generate.py --out build/pictures

test: $(VENV)/installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A changed pin builds the environment anew; otherwise it is used as it is.
$(VENV)/host: requirements/host.txt requirements/dev.txt requirements/engine.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the pinned host stack needs Python 3.11, got " + sys.version.split()[0] + ": set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -r requirements/host.txt -r requirements/dev.txt
	@$(BIN)/python -c 'import torch' || { echo 'torch of requirements/host.txt does not import: its CPU build is needed. Where your package index serves a CUDA build under that version, point PIP_EXTRA_INDEX_URL at the index of CPU builds that PyTorch has.'; exit 1; }
	$(PIP) --target $(VENV)/engine -r requirements/engine.txt
	@touch $@

$(VENV)/installed: $(VENV)/host setup.cfg $(shell test -x $(BIN)/vllm-musa-headpar || echo FORCE)
	$(PIP) --no-build-isolation --editable .
	@touch $@

FORCE:

clean:
	rm -rf $(VENV) build *.egg-info
