#!/usr/bin/env bash
# Makes the virtual environment $1 with $PYTHON, or with the first suitable Python found. Does nothing when it is there.
set -euo pipefail
venv=$1

suits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
has_numpy_wheel() { "$1" -c 'import sys; sys.exit(not sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
fail() { printf '%s\n' "$@" >&2; exit 1; }

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    suits "$venv/bin/python" || fail "$venv holds an unsuitable Python: make clean, then try again."
    exit 0
fi

python=${PYTHON:-}
if [ -n "$python" ]; then
    suits "$python" || fail "PYTHON=$python is not Python 3.10 to 3.13 ($("$python" --version 2>&1 || true))."
else
    # Python 3.13 last: numpy below 2, which Triton's stubs need, must be compiled there.
    for candidate in python3 python3.12 python3.11 python3.10; do
        if suits "$candidate" && has_numpy_wheel "$candidate"; then python=$candidate; break; fi
    done
    if [ -z "$python" ]; then
        for candidate in python3 python3.13; do
            if suits "$candidate"; then python=$candidate; break; fi
        done
    fi
    [ -n "$python" ] || fail "Python 3.10 to 3.13 is needed; python3 here is: $(command -v python3 >/dev/null && python3 --version 2>&1 || echo missing)." \
        "Install one, or name it: make PYTHON=/path/to/python3.12 demo"
fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"
has_numpy_wheel "$python" || {
    command -v cc >/dev/null && command -v c++ >/dev/null &&
        "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        fail "With Python 3.13 numpy 1.26 must be compiled: apt-get install gcc g++ python3-dev, or use PYTHON=python3.12."
    echo "Python 3.13: numpy 1.26 is compiled once, which takes about five minutes."
}
echo "making $venv with $("$python" --version) (the first time takes some minutes)"
"$python" -m venv "$venv"
