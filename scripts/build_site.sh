#!/usr/bin/env bash
# The pages as a site, in build/site, with tools of its own beside the environment: none of them is needed for anything else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DOCS_VENV=${DOCS_VENV:-.venv-docs}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "build_site: error: $python is older than Python 3.11; name another: make docs PYTHON=python3.11" >&2; exit 2; }
mapfile -t needs < <("$python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")')
if [[ ! -f $DOCS_VENV/.installed || $(<"$DOCS_VENV/.installed") != "${needs[*]}" ]]; then
    "$python" -m venv --clear "$DOCS_VENV"
    "$DOCS_VENV/bin/python" -m pip --disable-pip-version-check --quiet install "${needs[@]}"
    printf '%s\n' "${needs[*]}" >"$DOCS_VENV/.installed"
fi
"$DOCS_VENV/bin/mkdocs" build --strict
echo "build_site: build/site/index.html"
