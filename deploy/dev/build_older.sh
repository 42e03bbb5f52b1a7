#!/usr/bin/env bash
# Install an older build of the control plane beside this checkout: do both run in one fleet?
#
#   deploy/dev/build_older.sh COMMIT FOLDER
#
# FOLDER becomes an environment with the wheel of COMMIT, built from what git has of it, and with links
# to the dependencies of relume[control]. Nothing is fetched.
set -euo pipefail

if (($# != 2)); then
    echo "usage: build_older.sh COMMIT FOLDER" >&2
    exit 2
fi
commit=$1 folder=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
python=$checkout/.venv/bin/python
scratch=$(mktemp -d "${TMPDIR:-/tmp}/relume-older-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

mkdir "$scratch/source"
git -C "$checkout" archive "$commit" | tar -x -C "$scratch/source"
if ! "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch" \
    "$scratch/source" >"$scratch/build.log" 2>&1; then
    cat "$scratch/build.log" >&2
    echo "older build: $commit does not build" >&2
    exit 1
fi
"$python" -m venv --without-pip "$folder"
"$python" -m pip --python "$folder/bin/python" install --quiet --no-deps --no-index \
    "$scratch"/relume-*.whl
"$python" "$here/link_dependencies.py" control "$folder/dependencies"
site=$("$folder/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$(cd "$folder" && pwd)/dependencies" >"$site/dependencies.pth"
