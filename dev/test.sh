#!/usr/bin/env bash
# Set everything up and check everything: ruff, mypy, pytest. Stops at the first that fails, with its exit code.
#
#   bash dev/test.sh                              # all of it
#   bash dev/test.sh -x -k cursor tests/test_stream.py   # arguments go to pytest
#   bash dev/test.sh --hypothesis-profile=thorough       # laws get many more examples
#
# The suite passes on every CPU and on a busy machine. To check that here, run it as a CPU without AVX-512 would, as one
# without AVX2 would, and with a tenth of the processor time:
#
#   ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 bash dev/test.sh
#   ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 bash dev/test.sh
#   for i in $(seq "$(nproc)"); do timeout 2h sh -c 'while :; do :; done' & done; nice bash dev/test.sh
#
# Tests run on all cores (at most 8 files at once); `-n 0` runs them in one process, for a debugger or to see what they print.
# Cost: nothing. Hardware: any, no GPU needed. Duration: under 5 minutes on 2 slow cores, of which mypy takes 25 s the
# first time and 2 s later; setup aside.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run() {
    echo "+ $*"
    "$@"
}

run bash dev/setup.sh
export OMP_NUM_THREADS=1 # tests are small; more threads only wait for one another
export PYTHONDONTWRITEBYTECODE= # tests start many processes, which need not compile what another has
export PYTEST_XDIST_AUTO_NUM_WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 1)) # some wait for processes, or for time
run .venv/bin/python -m ruff check
# Beside mypy the tests are compiled, which else each of pytest's processes does; what is wrong with them is said below.
[[ -d tests/__pycache__ ]] || .venv/bin/python -m pytest -n 0 --collect-only -q > /dev/null 2>&1 &
run .venv/bin/python -m mypy
wait
run .venv/bin/python -m pytest "$@"
