# Every command makes what it needs; each is fast the second time.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
TRITON  = $(VENV)/triton
VARIANT ?= cpu
REGISTRY?= localhost
TAG     ?= 0.1.0-$(VARIANT)
PROJECT ?= flowmill
DOMAIN  ?= development
RECIPE  ?= smoke
IMAGES  = --image train=$(REGISTRY)/flowmill-train:$(TAG) --image reward=$(REGISTRY)/flowmill-reward:$(TAG)
COMMIT  = $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || echo unknown)
# all: ship this folder's code; none: use the code that the images hold.
COPY    ?= all
# Code that travels gives its hash as the version; code in images has none to give.
VERSION ?= $(if $(filter none,$(COPY)),$(TAG)-$(COMMIT))
# 1: Flyte Admin at FLYTE_ENDPOINT speaks TLS.
TLS     ?=
SECURE  = $(filter-out 0 false no,$(TLS))
CHECK   = $(BIN)/python -m workflows.preflight --project $(PROJECT) --domain $(DOMAIN) $(if $(SECURE),--tls)
# pyflyte reads other names than FLYTE_ENDPOINT; without that, its own variables or config file hold. Level 40, because
# at 30 it prints its whole configuration, a client's secret included.
ADMIN   = $(if $(FLYTE_ENDPOINT),FLYTE_PLATFORM_URL='$(FLYTE_ENDPOINT)') \
          $(if $(SECURE)$(FLYTE_ENDPOINT),FLYTE_PLATFORM_INSECURE=$(if $(SECURE),false,true)) \
          FLYTE_SDK_LOGGING_LEVEL=$${FLYTE_SDK_LOGGING_LEVEL:-40}
RUN     = $(BIN)/pyflyte run workflows/flowgrpo.py flowgrpo

.PHONY: demo smoke test test-slow test-interpreter test-gpu test-cluster lint ui pretrain demo-study images stack \
        package preflight register env clean help

help:            ## Show this list
	@grep -E '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

env: $(STAMP)    ## Make the environment from requirements.lock

$(STAMP): requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "flowmill needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable ./kernels
	touch $@

demo: env        ## Train the embedded model with RL and print accuracy before and after
	$(RUN) --recipe demo

smoke: env       ## Run two small iterations of everything
	$(RUN) --recipe smoke

test: env        ## Run the default tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: env   ## Run the slow tests too (minutes; the browser test needs Chromium)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow or not (gpu or cluster)'

# Beside the environment: CPU users need no triton, and its interpreter wants a numpy of its own.
$(TRITON)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(TRITON) triton==3.6.0 numpy==2.3.5
	touch $@

test-interpreter: $(TRITON)/.installed ## Run the GPU kernels' tests in Triton's interpreter, without a GPU
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels -k interpret

test-gpu: env    ## Run the kernels' tests on this machine's GPU
	$(BIN)/python -m pytest -n 8 tests/kernels -m gpu

test-cluster: env ## Run the tests that build and start containers (needs podman)
	$(BIN)/python -m pytest tests/images tests/k8s -m cluster

lint: env        ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

ui: env          ## Open MLflow on http://127.0.0.1:5000
	$(BIN)/mlflow ui --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/mlflow.db}" --port 5000

pretrain: env    ## Make the embedded checkpoint again
	$(BIN)/python -m tasks.policies._pretrain_tiny_text --out tasks/policies/assets/tiny_text.safetensors

demo-study: env  ## The demo on three seeds with its controls (an hour)
	$(BIN)/python -m workflows.study

images:          ## Build the container images with docker or podman (VARIANT=cuda, REGISTRY=..., TAG=...)
	$(PYTHON) images/build.py --variant $(VARIANT) --registry $(REGISTRY) --tag $(TAG) $(BUILD)

stack: env       ## Run a recipe as on the cluster, in the built images, without Kubernetes (RECIPE=smoke)
	$(BIN)/python -m k8s.stack --recipe $(RECIPE) --registry $(REGISTRY) --tag $(TAG)

package: env     ## Write dist/flowmill.tgz: what a cluster registers
	mkdir -p dist
	$(BIN)/pyflyte --pkgs workflows package $(IMAGES) --source . --output dist/flowmill.tgz --force --copy $(COPY) \
	  --in-container-source-path /workspace --env FLOWMILL_COMMIT=$(COMMIT)

preflight: env   ## Say which of Flyte, the store and MLflow cannot be reached (PROJECT, DOMAIN, TLS=1)
	$(CHECK)

register: env    ## Register tasks, workflow and launch plans with Flyte (PROJECT, DOMAIN, REGISTRY, TAG, COPY, TLS=1)
	$(CHECK) --only flyte
	$(ADMIN) $(BIN)/pyflyte register workflows $(IMAGES) --project $(PROJECT) --domain $(DOMAIN) --copy $(COPY) \
	  $(if $(VERSION),--version $(VERSION)) --destination-dir /workspace --env FLOWMILL_COMMIT=$(COMMIT) \
	  --service-account flowmill-task

clean:           ## Remove the environment, the local store, MLflow's files and the package
	rm -rf $(VENV) .flowmill mlflow.db mlartifacts mlruns dist
