# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv once.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install demo test verify check docs clean

install: $(READY)

# PYTHON=/path/to/python names another Python than the first of 3.11 to 3.13 that is found.
$(READY): pyproject.toml install.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh install.sh
	@touch $(READY)

# A run never writes into another's folder, so an earlier demo is moved aside.
demo: $(READY)
	@test ! -e runs/quickstart || mv runs/quickstart "runs/quickstart-$$(date +%Y%m%d-%H%M%S)"
	@echo "A small chat model now learns one-digit sums. On two cores it takes two to ten minutes; Ctrl-C keeps a checkpoint."
	@$(BIN)/ycore grpo --recipe quickstart --steps 10 --learning-rate 4e-4 --eval-dataset "task:addition?digits=1" --eval-every 10

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages as a site with a search, in build/site; nothing is fetched, and a broken link ends it.
docs: $(READY)
	@echo "Building the site of docs/, about ten seconds."
	@while sleep 3; do echo "now  building the site"; done & \
	$(BIN)/zensical build --strict; status=$$?; kill $$!; exit $$status

# Three workers for two cores, because much of a test's time is waiting for processes; each plays whole files, in their
# order. Threads do not wait spinning, and what is compiled is kept, for each of a thousand processes would compile it anew.
PYTEST := GOMP_SPINCOUNT=10000 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not verify and not gpu"

# The long checks: kills at random moments, power cuts, fuzzing, escapes, whole runs of each kind. Before a release.
verify: $(READY)
	$(PYTEST) -m "verify and not gpu"

clean:
	rm -rf $(VENV) build dist *.egg-info
