#!/bin/sh
# Print the path of a Python of version $1 (as 3.12) that works, or nothing.
# Asked by running it: under pyenv the name on PATH may be a shim that only fails.
version=$1
check="import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"

for candidate in "python$version" python3 python "$(pyenv root 2>/dev/null)/versions/$version".*/bin/python; do
    if "$candidate" -c "$check" >/dev/null 2>&1; then
        command -v "$candidate"
        exit 0
    fi
done
exit 0
