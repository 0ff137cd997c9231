# Needs Python 3.11 or newer, make, and the package registries on the first call. Everything else lands in .venv.
PYTHON ?= python3
BIN := .venv/bin
# processes that run tests, of up to 4 GB each: three for two cores, because many tests wait for other processes
WORKERS := 3
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --durations 15
# folder of real data: `make slow DATA=FOLDER`. Without it the tests that need real data are skipped
DATA :=
export TOKENMILL_TEST_DATA := $(DATA)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test slow gpu chaos simulate fuzz bench docs lint clean

# what the demo runs on. torch first and alone: its wheel is chosen by the machine, the constraints then hold for all
# that depends on it
.venv/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing PyTorch into .venv"
	@$(BIN)/python demo/install.py torch==2.13.0 -c constraints.txt
	@echo "installing Tokenmill with what the pipeline, the trainer and the web service need (about 150 packages, 330 MB)"
	@$(BIN)/python demo/install.py -c constraints.txt -e '.[pipeline,trainer,service]'
	touch $@

# and what the tests need beyond it
.venv/.installed: .venv/.demo
	@echo "installing what the tests need"
	@$(BIN)/python demo/install.py -c constraints.txt -e '.[pipeline,trainer,service,s3,dev]'
	touch $@

# the language model, which the language filter and its tests want
.venv/.models: .venv/.demo pipeline/fetch.py
	$(BIN)/python -c "from pipeline.fetch import fetch; print(fetch('lid176'))"
	touch $@

demo: .venv/.models     ## the whole way on real input, in under ten minutes on two cores
	$(BIN)/python -m demo

test: .venv/.installed .venv/.models     ## all tests but the slow ones
	$(PYTEST) -m "not slow and not chaos and not gpu"

slow: .venv/.installed .venv/.models     ## the slow ones: whole recipes, kills, real corpora
	$(PYTEST) -m "slow and not gpu"

gpu: .venv/.installed    ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu tests/trainer tests/stages/test_encoder.py

chaos: .venv/.installed .venv/.models    ## kills at seeded points, poisoned documents, fenced drivers, clusters that come and go (long)
	$(PYTEST) -m "not gpu" tests/chaos tests/e2e tests/deploy tests/storage tests/trainer/test_damage.py tests/pipeline/test_forecast.py tests/pipeline/test_engine_faults.py tests/pipeline/test_engine_blame.py tests/pipeline/test_engine_processes.py tests/pipeline/test_engine_ray.py tests/pipeline/test_engine_cluster.py

simulate: .venv/.installed               ## N=1000 histories of drivers in virtual time with faults; SEED=17 runs that one again
	$(BIN)/python -m tests.simulate $(if $(N),--count $(N)) $(if $(SEED),--seed $(SEED))

fuzz: .venv/.installed .venv/.models     ## the property tests with many more examples
	$(PYTEST) --hypothesis-profile fuzz -m "hypothesis and not gpu"

bench: .venv/.installed .venv/.models    ## the engine against a plain pool; the filters against datatrove, in an environment of its own
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/fineweb_vs_datatrove.py

docs: .venv/.demo       ## the tables of options in docs/cli.md, the settings in docs/training.md, the schema in docs/report.md
	$(BIN)/python -m pipeline.cli.reference docs/cli.md
	$(BIN)/python -m trainer.tools.reference docs/training.md
	$(BIN)/python -m pipeline.report.reference docs/report.md

lint: .venv/.installed   ## style, types, and who may import whom; no test of behaviour (two minutes, then seconds)
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q -n 0 tests/test_imports.py

clean:                  ## what the demo and the tests leave behind, not .venv and not the downloads
	rm -rf demo-store .pytest_cache .ruff_cache .hypothesis .cache/demo/data
