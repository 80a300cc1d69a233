# One word each. Needs python 3.11 to 3.13 with venv, and make; everything else goes into .venv.
PYTHON ?= python3
PIP_ARGS ?=
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
GENERATED := diptych/v1 diptych/open_inference
PUBLISHED := proto/published.txtpb
GOLDEN := tests/integration/test_golden.py
PATIENT := $(GOLDEN) tests/integration/test_real_shapes.py tests/integration/linear tests/unit/engine/backends/cuda tests/unit/simulation tests/unit/bench
CALM := tests/chaos/test_handoff_faults.py tests/chaos/test_handoff_reads.py tests/chaos/test_cancel.py tests/chaos/test_links.py tests/chaos/test_restart.py
CHART_TOOLS := .cache/chart/tools
TOOL_CALLS := .cache/tool-calls
CLIENTS := .cache/clients
NODE_CLIENTS := .cache/node-clients
LM_EVAL := .cache/lm-eval
AIPERF := .cache/aiperf
IMAGE := tests/deploy/test_image.py
INSTALLED := tests/deploy/installed

# Each module is compiled when it is first imported, which of seven installed ones is one; where
# that could not be kept, every process would do it again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup demo test golden chaos chaos-long lint proto published bench gpu gpu-wheels chart chart-long image page constraints manifests toolcalls clients clients-long

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready  ## Create .venv and install everything into it

demo: .venv/ready  ## Three answers from 1 router + 1 prefill + 1 decode worker, with their timing
	$(PY) examples/demo.py

# Two at a time: much of it waits for processes to start. With it go the fault tests whose timers are
# long enough for a busy machine (CALM), behind the unit tests: CI's lint runs beside these. The other
# fault tests have deadlines and are alone; they leave half of two cores idle. Tests that only compute
# (golden ones, kernels in their interpreter, simulations) have none and take what the others leave:
# two of them, as both cores are theirs once the others are done. What is broken for all of them would
# take an hour to fail each: ten failures are enough.
BY_TWO := -n 2 --dist loadfile --no-loadscope-reorder
WHEN_IDLE := $(if $(shell command -v chrt),chrt --idle 0,nice -n 19)
test: .venv/ready  ## Unit, integration and fault tests; golden tests with five prompts per model
	@mkdir -p .cache
	$(WHEN_IDLE) $(PYTEST) --maxfail 10 $(BY_TWO) --timeout 1800 $(PATIENT) > .cache/patient.log 2>&1 & patient=$$!; \
	  trap "kill $$patient" INT TERM; \
	  $(PYTEST) --maxfail 10 $(BY_TWO) tests/unit tests/protocol $(CALM) tests/integration \
	    $(PATIENT:%=--ignore=%) && $(PYTEST) --maxfail 10 tests/chaos $(CALM:%=--ignore=%) \
	    || { code=$$?; kill $$patient; wait $$patient; exit $$code; }; \
	  wait $$patient; code=$$?; cat .cache/patient.log; exit $$code

golden: .venv/ready  ## Every golden prompt of every model, on every path
	$(PYTEST) $(GOLDEN) --golden-all

chaos: .venv/ready  ## Faults alone, as CI runs them: kills, stops, cut links, cancels, overload
	$(PYTEST) tests/chaos

chaos-long: .venv/ready  ## The same with ten times the cases, again with SmolLM2, and a long search of the protocol; hours
	$(PYTEST) tests/chaos --chaos-long
	$(PYTEST) tests/chaos/test_handoff_faults.py tests/chaos/test_handoff_reads.py tests/chaos/test_cancel.py \
	  tests/chaos/test_kill.py --chaos-long --chaos-model demo
	$(PYTEST) tests/protocol tests/unit/engine/test_device_completion.py --hypothesis-profile long

lint: .venv/ready  ## ruff, mypy, import rules, contracts that only grow, generated code up to date
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/buf lint proto
	.venv/bin/buf breaking proto --against $(PUBLISHED)
	@rm -rf .cache/proto && mkdir -p .cache/proto
	$(call generate,.cache/proto)
	@for each in $(GENERATED); do \
	  diff -r -x __init__.py -x __pycache__ .cache/proto/$$each $$each \
	    || { echo "$$each is out of date: run make proto"; exit 1; }; done

proto: .venv/ready  ## Regenerate diptych/v1 and diptych/open_inference from proto/
	$(call generate,.)

published: .venv/ready  ## Hold what proto/ has now to the rules of evolution, from here on
	.venv/bin/buf build proto --exclude-source-info -o $(PUBLISHED)

bench: .venv/ready  ## Measure the hand-off; nothing else should run (JSON in bench-handoff.json)
	$(PY) -m tests.bench.handoff --out bench-handoff.json

# Without a network, WHEELS is a folder of wheels (`make gpu-wheels` fills one) for a python that has
# torch, triton and transformers: they are unpacked, and nothing is installed.
GPU_JSON := bench-gpu.json
WHEELS :=
UNPACKED := .cache/gpu
GPU_WHEELS := .cache/gpu-wheels
ifeq ($(WHEELS),)
gpu: .venv/ready  ## On a machine with a GPU: the CUDA backend against transformers and torch (JSON in bench-gpu.json)
	$(PY) -m tests.gpu.check --out $(GPU_JSON)
else
gpu:
	@rm -rf $(UNPACKED)
	@for each in $(WHEELS)/*.whl; do $(PYTHON) -m zipfile --extract $$each $(UNPACKED) || exit 1; done
	PYTHONPATH=$(CURDIR):$(abspath $(UNPACKED)) $(PYTHON) -m tests.gpu.check --out $(GPU_JSON)
endif

GPU_PYTHON := 3.12
gpu-wheels: .venv/ready  ## Fetch what such a machine lacks, to be carried there: make gpu WHEELS=.cache/gpu-wheels
	$(PY) -m pip download --disable-pip-version-check $(PIP_ARGS) --no-deps --only-binary :all: \
	  --constraint deploy/constraints.txt --python-version $(GPU_PYTHON) --dest $(GPU_WHEELS) \
	  --requirement tests/gpu/wheels.txt

chart: .venv/ready $(CHART_TOOLS)/ready  ## Check the Helm chart and the image's recipe with helm 3, helm 4 and validators; fetches them
	PATH="$(CURDIR)/$(CHART_TOOLS)/bin:$$PATH" $(PYTEST) tests/deploy tests/unit/deploy --ignore=$(IMAGE) --ignore=$(INSTALLED)

# Pods and services have addresses of their own, which no other process of the machine sees; all of
# them end with make, whatever ends it.
UNSHARE := setpriv --pdeathsig KILL unshare --map-root-user --net --pid --fork --kill-child --mount-proc
ALONE := exec setpriv --pdeathsig KILL sh -c '$(UNSHARE) "$$@" & trap "kill -KILL $$!" INT TERM; wait $$!' sh \
  sh -euc 'ip link set lo up; for each in 10.98 10.99; do ip address add $$each.0.1/16 dev lo; done; exec "$$@"' sh
chart-long: .venv/ready  ## Install the chart by helm 4 into a real API server, with its pods as processes here; builds that server first: ten minutes, once
	$(PY) -m tests.deploy.installed.build
	$(ALONE) $(PYTEST) $(INSTALLED)

image: .venv/ready  ## Build the image and run its demo in it, as nobody and read-only; needs buildah and root
	$(PYTEST) $(IMAGE)

toolcalls: .venv/ready $(TOOL_CALLS)/ready  ## Text of tool calls that others collected, through the parsers of all families; fetches it
	PYTHONPATH=$(TOOL_CALLS) $(PY) -m tests.conformance.tool_calls

QUICK_CLIENTS := openai=$(PY) tritonclient=$(PY) llm-comply=$(PY) schemathesis=$(PY) \
  openai-node=$(NODE_CLIENTS) ai-sdk=$(NODE_CLIENTS) \
  litellm=$(CLIENTS)/bin/python langchain-openai=$(CLIENTS)/bin/python
clients: .venv/ready $(CLIENTS)/ready $(NODE_CLIENTS)/ready  ## Clients that others wrote, against a local cluster; installs 440 MB into environments of their own
	$(PY) -m tests.integration.clients.suite $(QUICK_CLIENTS)

clients-long: .venv/ready $(CLIENTS)/ready $(NODE_CLIENTS)/ready $(LM_EVAL)/ready $(AIPERF)/ready  ## The same, the scores of lm-eval beside those of transformers, and aiperf; installs 1.9 GB more
	$(PY) -m tests.integration.clients.suite $(QUICK_CLIENTS) lm-eval=$(LM_EVAL)/bin/python aiperf=$(AIPERF)/bin/python

page: .venv/page  ## Drive the web page in a headless Chromium, which has to be there; pictures go to docs/page
	$(PYTEST) tests/page

constraints: .venv/ready  ## Write down the versions that the image has: those of .venv
	$(PY) -m tests.deploy.constraints

manifests: .venv/ready  ## Write the chart's schema and rendered manifests anew; fetches helm 4
	$(PY) -m tests.deploy.manifests

define generate
$(PY) -m grpc_tools.protoc -I proto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) \
  --plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc --mypy_grpc_out=$(1) \
  proto/diptych/*/*.proto
endef

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "$(PYTHON) is not python 3.11 to 3.13: say make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS) -e '.[worker,dev]'
	@touch $@

.venv/page: .venv/ready
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[page]'
	@touch $@

$(TOOL_CALLS)/ready: Makefile
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps --upgrade --target $(TOOL_CALLS) canitoolcall==0.1.1
	@touch $@

$(CLIENTS)/ready: Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) litellm==1.106.2 langchain-openai==1.7.3
	@touch $@

# The last that run on Node 20. Without npm nothing is installed, and the suite says so.
$(NODE_CLIENTS)/ready: Makefile
	@mkdir -p $(NODE_CLIENTS)
	@if command -v npm > /dev/null; then \
	  npm install --prefix $(NODE_CLIENTS) --no-audit --no-fund \
	    openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 && touch $@; \
	else echo "no npm: clients for Node are left out"; fi

$(AIPERF)/ready: Makefile
	$(PYTHON) -m venv $(AIPERF)
	$(AIPERF)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) aiperf==0.13.0
	@touch $@

# What is large (torch, transformers) is that of .venv: found behind what is installed here.
$(LM_EVAL)/ready: Makefile .venv/ready
	$(PY) -m venv $(LM_EVAL)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(LM_EVAL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(LM_EVAL)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) 'lm-eval[api]==0.4.13' accelerate==1.15.0
	@touch $@

$(CHART_TOOLS)/ready: pyproject.toml
	$(PYTHON) -m venv $(CHART_TOOLS)
	$(CHART_TOOLS)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) '.[chart]'
	@touch $@
