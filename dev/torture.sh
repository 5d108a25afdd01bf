#!/usr/bin/env bash
# Kill one training run N times, compare it with a run that nothing happened to, print a table and "N of N equal".
#
#   bash dev/torture.sh 50                # SIGKILL, SIGTERM, SIGINT at random moments; --seed repeats the choices
#
# Cost and hardware: two CPU cores, 200 MB below $TMPDIR, which are deleted. Duration: 50 kills 1 to 2 minutes. Exit
# code 1 if anything differs; the folder is then kept and named.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1
exec "$python" -m dev.torture "$@"
