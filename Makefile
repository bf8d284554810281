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
SITE_SOURCES := $(shell find site lib/rankcell tests/lessons -name _build -prune -o -type f \! -path '*/__pycache__/*' -print)
# Where the course can be cloned and where its site will stand, for links and the sitemap; see site/conf.py.
export COURSE_REPOSITORY COURSE_ADDRESS
PUBLISHED := $(COURSE_REPOSITORY)$(COURSE_ADDRESS)
# Parts of the tests that run beside each other: some mostly wait, for a cluster or for something that hangs. Only one of
# them needs a cluster: two on one machine could meet.
CLUSTER := $(addprefix tests/test_,nodes.py slurm.py)
CLUSTER_LESSONS := $(filter %_jobs.ipynb %_failures.ipynb,$(NOTEBOOKS))
# The other lessons are three parts.
LATE_LESSONS := $(filter $(foreach n,10 13 15 17 18 19 20 21 22 25 26,notebooks/$(n)_%),$(NOTEBOOKS))
MIDDLE_LESSONS := $(filter $(foreach n,07 08 09 11 12 27,notebooks/$(n)_%),$(NOTEBOOKS))
EARLY_LESSONS := $(filter-out $(MIDDLE_LESSONS) $(LATE_LESSONS) $(CLUSTER_LESSONS),$(NOTEBOOKS))
# Tests of ranks that hang, die or are interrupted.
ENGINE := $(addprefix tests/test_,failures.py grade.py kernel.py nccl_half.py odd_programs.py run.py)
# Tests that train on four ranks.
TRAINING := $(addprefix tests/test_,against.py context.py ddp.py experts.py pipeline.py silent_bugs.py tensor.py)
# nbval runs each notebook once; tests/judge.py adds the author's proof and wrong answers to the exercises.
NBVAL = $(BIN)/python -m pytest -p no:cacheprovider -p judge --nbval-lax --nbval-current-env \
	--nbval-cell-timeout=600 --nbval-sanitize-with=tests/sanitize.cfg

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

test: $(INSTALLED) ## lint, types, tests, and nbval over every notebook, with right and wrong answers
	@$(BIN)/python -m compileall -q lib # or each process would, where Python is told to write no bytecode
	@$(MAKE) --jobs=4 --keep-going --output-sync=target --no-print-directory .training-tests .cluster-tests .late-lessons \
		.engine-tests .early-lessons .middle-lessons .other-tests .site-tests .lint

notebooks: $(INSTALLED) ## nbval over all notebooks, or these: NB=notebooks/04_collectives.ipynb
	$(NBVAL) $(or $(NB),$(NOTEBOOKS))

.lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.cluster-tests:
	$(BIN)/python -m pytest -rs $(CLUSTER)
	$(NBVAL) -rs $(CLUSTER_LESSONS)

.early-lessons:
	$(NBVAL) $(EARLY_LESSONS)

.middle-lessons:
	$(NBVAL) $(MIDDLE_LESSONS)

.late-lessons:
	$(NBVAL) $(LATE_LESSONS)

.engine-tests:
	$(BIN)/python -m pytest -rs $(ENGINE)

.site-tests:
	$(BIN)/python -m pytest -rs tests/test_site.py

.training-tests:
	$(BIN)/python -m pytest -rs $(TRAINING)

.other-tests:
	$(BIN)/python -m pytest -rs tests $(addprefix --ignore=,$(CLUSTER) tests/test_site.py $(TRAINING) $(ENGINE))

execute: $(INSTALLED) ## format and run stale notebooks in place, or these: NB=notebooks/04_collectives.ipynb
	@$(if $(NB)$(NOTEBOOKS),$(BIN)/ruff format $(or $(NB),$(NOTEBOOKS)) >/dev/null)
	@$(BIN)/python tools/notebooks.py execute $(or $(NB),--stale $(NOTEBOOKS))

check: $(INSTALLED) .lint ## format, lint, types and fast tests
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

bench: $(INSTALLED) ## what a rank cell costs beside its alternatives (adds ipyparallel to the environment)
	$(BIN)/python -m pip install --quiet "ipyparallel>=9.0"
	$(BIN)/python tools/bench.py

matrix: ## fast tests with torch 2.11 and 2.15, and with Python 3.11 and 3.13, in environments of their own (10 GB)
	@tools/matrix $(MATRIX)

gpu: ## on a machine with a GPU, without a network: its tests, the lessons, and notebooks/recorded/<gpu>.json
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) tools/gpu.py

student: $(INSTALLED) ## copies for students in student/, opened in JupyterLab: stubs for solutions (OPEN= to only write)
	@$(BIN)/python tools/notebooks.py student --to student $(NOTEBOOKS)
	@$(if $(OPEN),$(LAB) student/00_start.ipynb,echo "To open them: $(LAB) student/00_start.ipynb")

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
