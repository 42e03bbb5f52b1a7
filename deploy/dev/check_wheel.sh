#!/usr/bin/env bash
# Build the wheels and try them where the checkout is not: does what we ship work without what we
# have?
#
#   deploy/dev/check_wheel.sh [RELUME_WHEEL RELUME_CHAOS_WHEEL]   (default: build them from here)
#
# For the base, relume[control] and relume-chaos in turn: a fresh environment that holds the wheel
# (for relume-chaos: both) and links to exactly the dependencies declared for it. There every module
# of the packages that need no engine is imported, and a command started; relume-chaos lists its
# scenarios. Finds an undeclared dependency, a module or a file of the page left out, and a script
# without its target.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
python=$checkout/.venv/bin/python
if [[ ! -x $python ]]; then
    echo "wheel: no environment in $checkout/.venv; run \`make env\` first" >&2
    exit 1
fi
scratch=$(mktemp -d "${TMPDIR:-/tmp}/relume-wheel-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

if (($# == 2)); then
    wheel=$1 chaos_wheel=$2
else
    if ! "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch" \
        "$checkout" "$checkout/chaos" >"$scratch/build.log" 2>&1; then
        cat "$scratch/build.log" >&2
        echo "wheel: it does not build" >&2
        exit 1
    fi
    wheel=$(echo "$scratch"/relume-*.whl)
    chaos_wheel=$(echo "$scratch"/relume_chaos-*.whl)
fi

import_all='import importlib, pkgutil, sys
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
if "relume.controlplane" in sys.argv[1:]:
    from relume.controlplane.ui.static_files import read_files
    assert {"index.html", "main.js", "page.css"} <= set(read_files()), "files of the page are missing"'
failed=0
for extra in base control chaos; do
    fresh=$scratch/$extra
    wheels=("$wheel")
    case $extra in
        base) command=(relume worker --help) packages=(relume.events relume.policies) ;;
        control) command=(relume serve --help) packages+=(relume.controlplane) ;;
        chaos) command=(relume-chaos list) wheels+=("$chaos_wheel") ;;
    esac
    "$python" -m venv --without-pip "$fresh"
    "$python" -m pip --python "$fresh/bin/python" install --quiet --no-deps --no-index "${wheels[@]}"
    "$python" "$here/link_dependencies.py" "$extra" "$scratch/$extra-dependencies"
    site=$("$fresh/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$scratch/$extra-dependencies" >"$site/dependencies.pth"
    if ! (cd / && "$fresh/bin/python" -I -c "$import_all" "${packages[@]}" &&
        "$fresh/bin/${command[0]}" "${command[@]:1}") >"$scratch/said" 2>&1; then
        tail -n 3 "$scratch/said" >&2
        echo "wheel ($extra): a module of ${packages[*]} or \`${command[*]}\` fails" >&2
        failed=1
    else
        echo "wheel ($extra): all of ${packages[*]} imports, \`${command[*]}\` works"
    fi
done
exit "$failed"
