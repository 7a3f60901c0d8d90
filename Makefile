# Everything a newcomer needs: `make demo`, `make test`. PYTHON chooses the interpreter that makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The demo needs none of the extras; once they are there, it takes that environment. uv, where it is, chooses the torch of
# this machine, which without an NVIDIA card is a tenth of the size.
PLAIN := $(VENV)/.plain
EXTRAS := report,deploy,tables,networks,medical,privacy,export,search,cluster,ray,volumes,databases,monitoring
DOCS := $(VENV)-docs
FLARE_NEXT := $(VENV)-flare
# Three for two cores: tests that wait for processes to start leave one idle.
FEDSHIFT_WORKERS ?= 3
MUTATION_JOBS ?= 2

.PHONY: demo docs notebooks chart wheelhouse test test-slow references mutation test-cluster test-flare-next test-processors check-results lint audit sbom lock bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,$(EXTRAS)]"
	touch $(READY)

$(PLAIN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	uv pip install --quiet --python $(BIN)/python --torch-backend auto -c constraints.txt -e ".[report]" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[report]"
	touch $(PLAIN)

demo: $(if $(wildcard $(READY)),$(READY),$(PLAIN))  ## compare four methods on rotated digits; ends with a table and runs/demo/report.html
	$(BIN)/fedshift demo

# Those on real data need FEDSHIFT_DATA and FEDSHIFT_WEIGHTS, and say so when they skip.
test: $(READY)  ## the tests of every change, under five minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(FEDSHIFT_WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not cluster"

test-slow: $(READY)  ## the other tests: they start processes, or take seconds each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(FEDSHIFT_WORKERS) --dist loadfile --no-loadscope-reorder -m "slow and not cluster"

references: $(READY)  ## every number that an authors' function gave beside ours; writes tests/references/README.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/references/list_references.py

test-cluster: $(READY)  ## on a SLURM of two nodes, which the tests start; needs root and the packages slurm-wlm, munge and bindfs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster -rs --durations=0 tests/cluster

test-flare-next: $(READY)  ## deployments under NVIDIA FLARE's newest pre-release, in an environment beside the other one
	$(BIN)/python -m venv --clear $(FLARE_NEXT)
	$(FLARE_NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --pre --no-deps nvflare
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> "$$($(FLARE_NEXT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth"
	$(FLARE_NEXT)/bin/python -c "import nvflare; print('NVIDIA FLARE', nvflare.__version__)"
	OMP_NUM_THREADS=1 $(FLARE_NEXT)/bin/python -m pytest tests/deploy/flare tests/deploy/cli

test-processors: $(READY)  ## the same under other instruction sets and numbers of threads, one after the other
	FEDSHIFT_WORKERS=$(FEDSHIFT_WORKERS) tests/processors.sh $(BIN)/python

check-results: $(READY)  ## what is committed of the benchmarks' results is whole, and belongs to the commands beside it
	$(BIN)/python benchmarks/belongs.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python -m pytest benchmarks/test_results.py

mutation: $(READY)  ## break the code on purpose and see whether tests notice: tests/mutation/report.md (minutes)
	$(BIN)/python tests/mutation/run.py --jobs $(MUTATION_JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec examples/deploy/compose.yaml

chart: $(READY)  ## Helm's own lint of examples/deploy/chart, and Kubernetes' schemas of what it makes; 350 MB, so not in lint
	$(BIN)/python -m pip install --quiet --disable-pip-version-check helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	$(BIN)/python -m pytest -m "" tests/deploy/cli/test_examples_of_deployment.py -k chart -rs

wheelhouse: $(READY)  ## all wheels that a role needs, by their hashes, in build/wheels, for machines without a network
	$(BIN)/python examples/deploy/wheelhouse.py build/wheels

audit: $(READY)  ## known flaws in the pinned packages (asks the package index), and in our own code
	$(BIN)/bandit --quiet --recursive src --configfile pyproject.toml
	$(BIN)/python tests/audit_lock.py

sbom: $(READY)  ## what is installed, as CycloneDX JSON: sbom.json
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-format JSON --validate --output-file sbom.json

lock:  ## pin every package of every platform by its hashes: requirements.lock; needs uv
	uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --all-extras --no-header --no-annotate --constraints constraints.txt --output-file requirements.lock pyproject.toml

bench: $(READY)  ## ratios measured in one run, written to benchmarks/results/bench.json
	$(BIN)/python benchmarks/bench.py

docs:  ## the documentation site, build/docs/html/index.html; a warning or a dead link within it is a failure
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs,$(EXTRAS)]"
	PYTHONPATH=benchmarks:docs $(DOCS)/bin/python docs/site/assemble.py build/docs/source
	$(DOCS)/bin/python -m sphinx --fail-on-warning --keep-going --fresh-env -q -c docs/site build/docs/source build/docs/html
	$(DOCS)/bin/python docs/site/dead_links.py build/docs/html

notebooks: $(READY)  ## examples/notebooks/*.ipynb from the scripts beside them
	$(BIN)/python docs/notebooks.py

clean:
	rm -rf $(VENV) $(DOCS) $(FLARE_NEXT) build/docs .pytest_cache .mypy_cache .ruff_cache
