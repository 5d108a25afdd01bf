#!/usr/bin/env bash
# Compare our samples and blends with those of megatron-core itself, live, on random corpora.
#
#   bash dev/compare_megatron.sh [--corpora 20] [--seed 0]
#
# megatron-core needs no GPU for this, but it wants to be installed: it goes, without its dependencies, into a virtual
# environment of its own (VENV, default: megatron-core in the base directory) that sees our torch and NumPy. A package
# index or a wheel (MEGATRON_CORE=/path/to/megatron_core-0.16.1-*.whl) is needed once. Wheels are built for Linux only.
# Cost and hardware: one CPU core, 100 MB on disk. Duration: about a minute. Exit code 1 on a difference.
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
