#!/bin/sh
# Finds some Python >= 3.11 that really runs and hands over to bootstrap.py.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

# A name on PATH proves nothing: a version manager's shim may refuse to run, so each one is tried.
for python in ${PYTHON:-} python3 python3.12 python3.13 python3.11 python3.14 /usr/bin/python3 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$python" -B "$here/bootstrap.py" "$@"
    fi
done

echo "bootstrap: no Python >= 3.11 runs here; install one, or name it: make install PYTHON=/path/to/python3" >&2
exit 1
