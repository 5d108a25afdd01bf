#!/usr/bin/env bash
# Set up .venv, then run ruff, mypy and pytest. Stops at the first failure, with its exit code.
#
#   bash dev/test.sh                                     # everything
#   bash dev/test.sh tests/spec                          # the specification: arguments are passed to pytest
#   bash dev/test.sh --hypothesis-profile=thorough       # many more examples per law
#
# The suite passes on every CPU, even on a busy one. To check that, simulate a CPU without AVX-512, a CPU without AVX2,
# and a machine that leaves the tests a tenth of its time:
#
#   ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 bash dev/test.sh
#   ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 bash dev/test.sh
#   for i in $(seq "$(nproc)"); do timeout 2h sh -c 'while :; do :; done' & done; nice bash dev/test.sh
#
# Tests run on all cores (at most 8 files at once). `-n 0` runs them in one process, for a debugger or to see output.
# Cost: nothing. Hardware: any, a GPU is not needed. Duration: about 7 minutes on 2 cores plus the setup; mypy
# takes 25 s of it the first time and 2 s later.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
    echo "+ $*"
    "$@"
}

run bash dev/setup.sh
export OMP_NUM_THREADS=1 # models in tests are small: more threads would only wait for each other
export PYTHONDONTWRITEBYTECODE= # let the many processes of the tests share compiled bytecode
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 1)) # some tests only wait
run .venv/bin/python -m ruff check
run .venv/bin/python -m ruff format --check --quiet
# While mypy runs, compile the tests once instead of once per pytest process. pytest reports any errors below.
[[ -d tests/__pycache__ ]] || .venv/bin/python -m pytest -n 0 --collect-only -q > /dev/null 2>&1 &
run .venv/bin/python -m mypy
wait
run .venv/bin/python -m pytest "$@"
