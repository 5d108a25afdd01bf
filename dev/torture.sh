#!/usr/bin/env bash
# Kill a training run N times, compare it with an undisturbed run, and print a table and "N of N equal".
#
#   bash dev/torture.sh 50                # SIGKILL, SIGTERM and SIGINT at random moments; --seed repeats the choices
#
# Cost and hardware: two CPU cores and 200 MB below $TMPDIR, deleted at the end. Duration: 1 to 2 minutes for 50 kills.
# Exit code 1 if anything differs; the folder is then kept and its path printed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1
exec "$python" -m dev.torture "$@"
