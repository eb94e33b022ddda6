#!/bin/sh
# Make a virtual environment and install this project into it, with the given extras: venv.sh DIRECTORY EXTRAS [CONSTRAINTS]
# CONSTRAINTS is a file of versions for pip.
set -eu
venv=$1
extras=$2
constraints=${3:-}

usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    interpreter=
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c "$usable" >/dev/null 2>&1; then
            interpreter=$candidate
            break
        fi
    done
    if [ -z "$interpreter" ]; then
        echo "error: no Python 3.11 or newer with the venv and ensurepip modules was found." >&2
        echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "Creating $venv with $("$interpreter" --version)"
    rm -rf "$venv"
    "$interpreter" -m venv "$venv"
fi

# --quiet twice: errors only. Python compiles what is imported, which is a small part of it.
echo "Installing sparseallreduce[$extras] into $venv"
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --no-compile --editable ".[$extras]" \
    ${constraints:+--constraint "$constraints"}

# Compile to bytecode what processes that start together would each compile for themselves.
"$venv/bin/python" -c '
from importlib import import_module
from importlib.util import find_spec
for name in ("sparseallreduce.linear", "sklearn.linear_model", "matplotlib.pyplot", "pandas", "pytest", "hypothesis"):
    if find_spec(name.partition(".")[0]):
        import_module(name)
'
