#!/usr/bin/env bash
# Compare our samples and blends with those that megatron-core computes, on random corpora.
#
#   bash dev/compare_megatron.sh [--corpora 20] [--seed 0]
#
# The first run installs megatron-core without its dependencies into a virtual environment that sees our torch and NumPy
# (VENV, default: megatron-core in the base directory). That needs a package index or a wheel
# (MEGATRON_CORE=/path/to/megatron_core-0.16.1-*.whl); wheels exist for Linux only. No GPU is needed.
# Cost and hardware: one CPU core, 100 MB of disk. Duration: about a minute. Exit code 1 if anything differs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
venv=${VENV:-$("$python" -c 'from nanochat.common import get_base_dir; print(get_base_dir() / "megatron-core")')}
package=${MEGATRON_CORE:-megatron-core==0.16.1}

if [[ ! -e "$venv/installed" ]]; then
    echo "installing $package into $venv"
    "$python" -m venv --clear "$venv"
    ours=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    theirs=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$ours" > "$theirs/nanochat-environment.pth"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps "$package"
    touch "$venv/installed"
fi
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec "$venv/bin/python" -m dev.compare_megatron "$@"
