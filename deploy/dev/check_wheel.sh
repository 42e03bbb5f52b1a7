#!/usr/bin/env bash
# Build the wheels and try them where the checkout is not: does what we ship work without what we
# have?
#
#   deploy/dev/check_wheel.sh [RELUME_WHEEL RELUME_CHAOS_WHEEL]   (default: build them from here)
#
# For the base, relume[control] and relume-chaos in turn: a fresh environment that holds the wheel
# (for relume-chaos: both) and links to exactly the dependencies declared for it, then
# deploy/dev/wheel_probe.py imports every module there. Finds an undeclared dependency, a module
# left out of its wheel or in the wrong one, a script without its target, and a top-level name of
# ours that another distribution owns too.
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

failed=0
for extra in base control chaos; do
    fresh=$scratch/$extra
    wheels=("$wheel")
    if [[ $extra == chaos ]]; then
        wheels+=("$chaos_wheel")
    fi
    "$python" -m venv --without-pip "$fresh"
    "$python" -m pip --python "$fresh/bin/python" install --quiet --no-deps --no-index "${wheels[@]}"
    "$python" "$here/link_dependencies.py" "$extra" "$scratch/$extra-dependencies"
    site=$("$fresh/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    printf '%s\n' "$scratch/$extra-dependencies" >"$site/dependencies.pth"
    if ! (cd / && env -u PYTHONPATH "$fresh/bin/python" -I "$here/wheel_probe.py" "$extra" "$checkout"); then
        failed=1
    fi
    # A worker host installs the base alone, and starts its agent by this command.
    if ! (cd / && "$fresh/bin/relume" worker --help >"$scratch/help" 2>&1); then
        tail -n 3 "$scratch/help" >&2
        echo "wheel ($extra): \`relume worker --help\` fails" >&2
        failed=1
    fi
done
exit "$failed"
