#!/usr/bin/env bash
# Set up .venv: Python 3.11 or newer, torch, the other dependencies, and the test tools.
#
#   bash dev/setup.sh
#
# Cost: nothing. Hardware: any. Duration: 1 to 5 minutes on a fresh machine (torch is large), else under a second.
# A stamp in .venv records what is installed: the whole of pyproject.toml, and Python's version. It is
# deleted before an install and written after it, so an interrupted install is repeated. pyproject.toml pins the direct
# dependencies, and uv.lock pins every package. If uv is installed, it creates .venv from uv.lock and fetches a Python
# if needed; otherwise pip does. A .venv that pip created stays with pip. The tools' own settings apply (PIP_INDEX_URL,
# UV_DEFAULT_INDEX, ...).
# UV=no uses pip even if uv exists, for example for another build of torch (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
# PYTHON=/path/to/python picks an interpreter, which may belong to a venv. TORCH=installed uses its torch (2.11 or
# newer) and its other packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.setup-stamp
if grep -qs 'include-system-site-packages = true' .venv/pyvenv.cfg; then TORCH=installed; fi # as before

wanted_stamp() {
    if [[ "${TORCH:-}" == installed ]]; then echo "torch: installed"; fi
    .venv/bin/python -V && cat pyproject.toml
}

add_command() { # .venv/bin/nanochat, which runs this checkout from any folder
    if [[ -e .venv/bin/nanochat || -L .venv ]]; then return; fi
    printf '#!/bin/sh\nPYTHONPATH="%s${PYTHONPATH:+:$PYTHONPATH}" exec "%s/.venv/bin/python" -m nanochat "$@"\n' \
        "$PWD" "$PWD" >.venv/bin/nanochat
    chmod +x .venv/bin/nanochat
}

check_torch() { # interpreter: fail unless it has torch 2.11 or newer
    "$1" - <<'PY'
import sys
try:
    import torch
except ImportError:
    sys.exit(f"setup: TORCH=installed: {sys.executable} has no torch; choose one that has: PYTHON=/path/to/python")
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
    echo "setup: ${PYTHON:-python3} is not Python 3.11 or newer; install one, or choose one: PYTHON=/path/to/python" >&2
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

show_progress() { # name, output file: print the last line of the output every ten seconds
    local began=$SECONDS
    while sleep "${SETUP_PROGRESS_S:-10}" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        printf 'setup: installing %s, %d s: %.100s\n' "$1" $((SECONDS - began)) "$(tail -n 1 "$2")"
    done
}

quietly() { # name, command: run the command, and print its output only if it fails
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
        echo "setup: could not install $what; fix the cause and run this again" >&2
    fi
    rm -f "$output"
    return "$code"
}

install() { # a requirements file
    quietly "$1" .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar=off -r "$1"
}

finished() {
    wanted_stamp >"$stamp.tmp"
    mv "$stamp.tmp" "$stamp"
    add_command
    echo "setup: done; activate it with: source .venv/bin/activate"
    exit 0
}

if [[ -f "$stamp" ]] && wanted_stamp 2>/dev/null | cmp -s - "$stamp"; then
    add_command
    exit 0
fi
rm -f "$stamp"
made_by_pip=yes # unless .venv is missing, incomplete or without its Python: then uv or pip may create it
.venv/bin/python -m pip --version >/dev/null 2>&1 || made_by_pip=
if [[ -z "$made_by_pip" && "${UV:-}" != no && "${TORCH:-}" != installed ]] && command -v uv >/dev/null; then
    echo "setup: installing the packages of uv.lock into .venv with $(uv --version) (1 to 5 minutes, the first time)"
    quietly uv.lock uv sync --inexact --extra dev ${PYTHON:+--python "$PYTHON"} # keeps other packages in .venv
    finished
fi
if [[ -z "$made_by_pip" ]]; then
    python=$(find_python)
    site=""
    if [[ "${TORCH:-}" == installed ]]; then
        check_torch "$python"
        site=--system-site-packages
    fi
    echo "setup: creating .venv with $("$python" -V)"
    "$python" -m venv --clear $site .venv
    if [[ -n "$site" ]]; then # if the interpreter is in a venv, .venv would not see that venv's packages
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/installed.pth"
    fi
fi
write_requirements
echo "setup: installing the packages of pyproject.toml into .venv (1 to 5 minutes, the first time)"
if [[ "${TORCH:-}" == installed ]]; then
    check_torch .venv/bin/python
else
    install .venv/requirements-torch.txt # first, so that no other package decides which build is installed
fi
install .venv/requirements-rest.txt
finished
