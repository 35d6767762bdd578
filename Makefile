# Two commands do everything: `make demo` and `make test`. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test quick soak bench docs clean

demo: .venv/demo.done
	@$(BIN)/sigcam demo --output sigcam-demo

test: .venv/dev.done
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

quick: .venv/dev.done
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check --quick

SOAKED := test_differential test_staleness test_faults test_fuzz
soak: .venv/dev.done
	@SIGCAM_SOAK=1 $(BIN)/pytest -n 2 $(SOAKED:%=tests/contracts/%.py)

docs: .venv/dev.done
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/build-docs
	@echo "look at build/site/index.html"

bench: .venv/dev.done
	@$(BIN)/python benchmarks/start.py
	@$(BIN)/python benchmarks/maps.py
	@$(BIN)/python benchmarks/metrics.py
	@$(BIN)/python benchmarks/fit.py
	@$(BIN)/python benchmarks/evaluate.py
	@$(BIN)/python benchmarks/export.py

.venv/demo.done: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv
	@echo "installing sigcam into .venv (a few minutes, once) ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[embedded,report,examples]' 2>.venv/install.log || (cat .venv/install.log; exit 1)
	@touch $@

.venv/dev.done: .venv/demo.done
	@echo "installing what the tests need ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[embedded,report,examples,ui,hf,hub,lightning,export,docs,dev]' 2>.venv/install.log || (cat .venv/install.log; exit 1)
	@touch $@

clean:
	rm -rf .venv sigcam-demo
