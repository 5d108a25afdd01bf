#!/usr/bin/env bash
# Make .venv ready: Python 3.11 or newer, torch, the other dependencies, the tools of the tests.
#
#   bash dev/setup.sh
#
# Cost: nothing. Hardware: any. Duration: minutes on a fresh machine (torch is large), well under a second when nothing
# changed. The stamp in .venv holds what was installed: pyproject.toml, word for word, and Python's version. It goes
# before an install and comes back after it, so an interrupted one is done again. Versions stand in pyproject.toml; uv.lock
# has those of what these need. Where uv is installed it makes .venv, by uv.lock, and brings a Python if need be; else pip
# does, and one that pip made stays pip's. Their own settings are honoured (PIP_INDEX_URL, UV_DEFAULT_INDEX, ...).
# UV=no leaves uv out, as for another build of torch, which pip finds by PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL.
# PYTHON=/path/to/python picks an interpreter. TORCH=installed takes, by pip, the torch that it has, 2.11 or newer, with
# whatever else is installed there; it may be of a venv itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.setup-stamp
if grep -qs 'include-system-site-packages = true' .venv/pyvenv.cfg; then TORCH=installed; fi # it was made for that

wanted_stamp() {
    if [[ "${TORCH:-}" == installed ]]; then echo "torch: installed"; fi
    .venv/bin/python -V && cat pyproject.toml
}

check_torch() { # of the interpreter $1
    "$1" - <<'PY'
import sys
try:
    import torch
except ImportError:
    sys.exit(f"setup: TORCH=installed: {sys.executable} has no torch; name one that has: PYTHON=/path/to/python")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    sys.exit(f"setup: TORCH=installed: {sys.executable} has torch {torch.__version__}, expected 2.11 or newer")
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [[ -n "${PYTHON:-}" ]]; then break; fi
    done
    echo "setup: ${PYTHON:-python3} is not Python 3.11 or newer; install one, or name one: PYTHON=/path/to/python" >&2
    return 1
}

write_requirements() { # .venv/requirements-torch.txt and .venv/requirements-rest.txt, from pyproject.toml
    .venv/bin/python - <<'PY'
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
lines = {"torch": [], "rest": []}
for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
    lines["torch" if requirement.startswith("torch==") else "rest"].append(requirement + "\n")
for name, requirements in lines.items():
    Path(f".venv/requirements-{name}.txt").write_text("".join(requirements))
PY
}

show_progress() { # what is installed, and the file of its output: its last line, every ten seconds
    local began=$SECONDS
    while sleep "${SETUP_PROGRESS_S:-10}" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        printf 'setup: installing %s, %d s: %.100s\n' "$1" $((SECONDS - began)) "$(tail -n 1 "$2")"
    done
}

quietly() { # what is installed, and the command; its output is shown if it fails
    local what=$1 output code=0 progress
    shift
    output=$(mktemp)
    show_progress "$what" "$output" &
    progress=$!
    "$@" >"$output" 2>&1 || code=$?
    kill "$progress" 2>/dev/null || true
    wait "$progress" 2>/dev/null || true
    if [[ $code != 0 ]]; then
        cat "$output" >&2
        echo "setup: could not install $what; run this again when that is mended" >&2
    fi
    rm -f "$output"
    return "$code"
}

install() { # a requirements file
    quietly "$1" .venv/bin/python -m pip install --disable-pip-version-check --no-input -r "$1"
}

finished() {
    wanted_stamp >"$stamp.tmp"
    mv "$stamp.tmp" "$stamp"
    exit 0
}

if [[ -f "$stamp" ]] && wanted_stamp 2>/dev/null | cmp -s - "$stamp"; then
    exit 0
fi
rm -f "$stamp"
made_by_pip=yes # or by nobody, or half made, or its Python is gone: then either may make it anew
.venv/bin/python -m pip --version >/dev/null 2>&1 || made_by_pip=
if [[ -z "$made_by_pip" && "${UV:-}" != no && "${TORCH:-}" != installed ]] && command -v uv >/dev/null; then
    echo "setup: installing the packages of uv.lock into .venv with $(uv --version) (minutes, the first time)"
    quietly uv.lock uv sync --inexact --extra dev ${PYTHON:+--python "$PYTHON"} # what else is in .venv stays
    finished
fi
if [[ -z "$made_by_pip" ]]; then
    python=$(find_python)
    site=""
    if [[ "${TORCH:-}" == installed ]]; then
        check_torch "$python"
        site=--system-site-packages
    fi
    echo "setup: making .venv with $("$python" -V)"
    "$python" -m venv --clear $site .venv
    if [[ -n "$site" ]]; then # of an interpreter in a venv, .venv would only see what that one is made from
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed.pth"
    fi
fi
write_requirements
echo "setup: installing the packages of pyproject.toml into .venv (minutes, the first time)"
if [[ "${TORCH:-}" == installed ]]; then
    check_torch .venv/bin/python
else
    install .venv/requirements-torch.txt # alone, so that nothing else decides which build of it comes
fi
install .venv/requirements-rest.txt
finished
