# The two commands: `make train ARGS="attention=flash_v1"`, with any settings of train.py, and `make test`.
# `make test-gpu` is for a machine with a CUDA GPU.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: train test test-gpu lint format lock clean

train: $(READY)
	@$(BIN)/python train.py $(ARGS)

test: lint
	@$(BIN)/python -m pytest -n 2 $(ARGS)

# What fills the GPU runs after the rest, in one process; the rest in JOBS.
JOBS ?= 8
test-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make test-gpu needs a CUDA GPU; PyTorch finds none")'
	@$(BIN)/python -m pytest -m "gpu and not alone" -n $(JOBS) --dist worksteal $(ARGS)
	@$(BIN)/python -m pytest -m "gpu and alone" $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Byte code is made on every core (pip makes it on one), and not of what is rarely imported.
RARE := /(tests|testing|transformers/models)/

# The stamp is written last, so an interrupted install is done again.
$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON=/path/to/python3")'
	@echo "Setting up .venv (once, a few minutes) ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' .venv/lib || true
	@touch $(READY)

# Pins for every supported Python. torch pins its own nvidia-* packages exactly, so the lock need
# not, and a CPU build of the same torch installs from the same file.
lock:
	uv pip compile pyproject.toml --extra test --universal --python-version 3.10 \
	    --no-header --no-annotate -o requirements.lock
	sed -i '/^nvidia-/d;/^cuda-/d' requirements.lock

clean:
	rm -rf .venv .pytest_cache .ruff_cache
