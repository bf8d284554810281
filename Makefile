# Every target sets up what it needs: no target has to be run before another by hand.
# In a conda environment: make html VENV=$CONDA_PREFIX
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.rankcell-installed
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))
NB ?=
# The torch with which the notebooks were executed; pyproject.toml says which others will do.
TORCH := 2.13.0
OPEN ?= yes
SITE := site/_build/html
LAB = $(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root)
SITE_SOURCES := $(shell find site lib/rankcell tests/answers -name _build -prune -o -type f \! -path '*/__pycache__/*' -print)
# Where the course can be cloned and where its site will stand, for links and the sitemap; see site/conf.py.
export COURSE_REPOSITORY COURSE_ADDRESS
PUBLISHED := $(COURSE_REPOSITORY)$(COURSE_ADDRESS)
# Parts of the tests that run beside each other: some mostly wait, for a cluster or for something that hangs. Only one of
# them needs a cluster: two on one machine could meet.
CLUSTER := $(addprefix tests/test_,nodes.py slurm.py)
CLUSTER_LESSONS := 16_jobs or 17_failures
# The other lessons are two parts, of about the same time.
LATE_LESSONS := 09_ or 10_ or 11_ or 12_ or 13_ or 14_ or 15_ or 18_
# Tests of ranks that hang, die or are interrupted.
ENGINE := $(addprefix tests/test_,failures.py grade.py kernel.py nccl_half.py odd_programs.py run.py)
# Tests that train on four ranks.
TRAINING := $(addprefix tests/test_,against.py combining.py context.py ddp.py experts.py fsdp.py pipeline.py \
	rehearse.py silent_bugs.py tensor.py together.py zero.py)
# Of cases and wrong answers that are alike `make test` takes some, and `make test SAMPLED=` all.
SAMPLED ?= --sampled

# The notebooks with their exercises; their checks hold on a busy machine.
LESSONS := tests/test_exercises.py

# pip must neither ask questions nor advertise its next version.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help lab html slides pdf test notebooks execute check bench matrix gpu student

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s  %s\n", $$1, $$2 }' Makefile

lab: $(INSTALLED) ## open the course in JupyterLab, with solutions folded away
	@$(BIN)/jupyter trust $(NOTEBOOKS) >/dev/null
	$(LAB) notebooks/00_start.ipynb

html: $(INSTALLED) ## build the course site, after running the notebooks that need it
	@$(BIN)/python tools/notebooks.py execute --stale $(NOTEBOOKS)
	@$(MAKE) --no-print-directory $(SITE)/.built
	@echo "The course is at file://$(CURDIR)/$(SITE)/index.html"

# What a page is made from: where none of it is newer than the site, there is nothing to build.
$(SITE)/.built: $(NOTEBOOKS) $(SITE_SOURCES) $(if $(PUBLISHED),always)
	@mkdir -p site/_build/source
	@$(BIN)/sphinx-build -q -c site -d site/_build/doctrees site/_build/source $(SITE)
	@$(if $(PUBLISHED),rm -f,touch) $@

always:

slides: $(INSTALLED) ## a deck for each lesson, in site/_build/slides
	@$(BIN)/python tools/handout.py slides site/_build/slides $(NOTEBOOKS)

pdf: html ## the course as one PDF, and the cheat sheet on one page, in site/_build (needs Chromium)
	@$(BIN)/python tools/handout.py pdf $(SITE) site/_build

test: $(INSTALLED) ## lint, types, tests, and every notebook from top to bottom, with right and wrong answers
	@$(BIN)/python -m compileall -q lib # or each process would, where Python is told to write no bytecode
	@$(MAKE) --jobs=4 --keep-going --output-sync=target --no-print-directory .lint .cluster-tests .early-lessons \
		.late-lessons .engine-tests .site-tests .training-tests .other-tests

notebooks: $(INSTALLED) ## only run the notebooks from top to bottom, with nbval: all, or NB=notebooks/04_collectives.ipynb
	$(BIN)/python -m pytest -p no:cacheprovider --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=600 --nbval-sanitize-with=tests/sanitize.cfg $(or $(NB),$(NOTEBOOKS))

.lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.cluster-tests:
	$(BIN)/python -m pytest -rs $(SAMPLED) $(CLUSTER)
	$(BIN)/python -m pytest -rx $(SAMPLED) $(LESSONS) -k "$(CLUSTER_LESSONS)"

.site-tests:
	$(BIN)/python -m pytest -rs $(SAMPLED) tests/test_site.py

.early-lessons:
	$(BIN)/python -m pytest -rx $(SAMPLED) $(LESSONS) -k "not ($(CLUSTER_LESSONS) or $(LATE_LESSONS))"

.late-lessons:
	$(BIN)/python -m pytest -rx $(SAMPLED) $(LESSONS) -k "$(LATE_LESSONS)"

.engine-tests:
	$(BIN)/python -m pytest -rs $(SAMPLED) $(ENGINE)

.training-tests:
	$(BIN)/python -m pytest -rs $(SAMPLED) $(TRAINING)

.other-tests:
	$(BIN)/python -m pytest -rs $(SAMPLED) $(addprefix --ignore=,$(CLUSTER) tests/test_site.py $(LESSONS) $(TRAINING) $(ENGINE))

execute: $(INSTALLED) ## format and run stale notebooks in place, or these: NB=notebooks/04_collectives.ipynb
	@$(if $(NB)$(NOTEBOOKS),$(BIN)/ruff format $(or $(NB),$(NOTEBOOKS)) >/dev/null)
	@$(BIN)/python tools/notebooks.py execute $(or $(NB),--stale $(NOTEBOOKS))

check: $(INSTALLED) .lint ## format, lint, types and fast tests
	$(BIN)/python -m pytest -q $(SAMPLED) -m "not slow and not gpu"

bench: $(INSTALLED) ## what a rank cell costs beside its alternatives (adds ipyparallel to the environment)
	$(BIN)/python -m pip install --quiet "ipyparallel>=9.0"
	$(BIN)/python tests/bench.py

matrix: ## fast tests with torch 2.11 and 2.15, and with Python 3.11 and 3.13, in environments of their own (10 GB)
	@tools/matrix $(MATRIX)

gpu: ## on a machine with a GPU, without a network: its tests, six lessons, and notebooks/recorded/<gpu>.json
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu.py

student: $(INSTALLED) ## copies for students in student/, opened in JupyterLab: stubs for solutions (OPEN= to only write)
	@$(BIN)/python tools/notebooks.py student --to student $(NOTEBOOKS)
	@$(if $(OPEN),$(LAB) student/00_start.ipynb,echo "To open them: $(BIN)/jupyter lab student/00_start.ipynb")

$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON). Install Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "This course needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
		echo "Name another one: make PYTHON=python3.12 html"; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); } || { \
		rm -rf $(VENV); echo "$(PYTHON) cannot make virtual environments here (Debian: apt-get install python3-venv)."; exit 1; }
	@echo "Installing what pyproject.toml lists; the first time takes a few minutes ..."
	@$(BIN)/python -m pip install --quiet --no-compile -e '.[lab,test,site]' 'torch==$(TORCH)'
	@$(BIN)/python -c 'import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)' # on all cores; pip takes one
	@$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (rankcell)" >/dev/null
	@$(if $(NOTEBOOKS),$(BIN)/jupyter trust $(NOTEBOOKS) >/dev/null)
	@touch $@
