#!/usr/bin/env bash
# Print the path of axe.min.js (axe-core, MPL-2.0), which checks the accessibility of the page in tests;
# everything else goes to stderr.
#
#   deploy/dev/get-axe.sh
#
# Looks at $RELUME_AXE, then takes the pinned version from the npm registry (npm pack; nothing is
# installed) into ~/.cache/relume/axe.
# Exit status: 0 found, 1 none found.
set -euo pipefail

version=4.10.3
sha256=0f2b4d7dcdf7d1219df8d1959ad68e565f51d14c3f0d88bb71cd59abeb956292
cache=${XDG_CACHE_HOME:-$HOME/.cache}/relume/axe
script=$cache/axe-$version.min.js

say() { printf 'axe: %s\n' "$*" >&2; }

for found in "${RELUME_AXE:-}" "$script"; do
    if [[ -n $found && -s $found ]]; then
        printf '%s\n' "$found"
        exit 0
    fi
done
if ! command -v npm >/dev/null; then
    say "no npm to fetch axe-core $version; set RELUME_AXE=/path/to/axe.min.js"
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
if ! timeout 120 npm pack --silent "axe-core@$version" >&2; then
    say "the npm registry gave no axe-core $version; set RELUME_AXE=/path/to/axe.min.js"
    exit 1
fi
if ! sha256sum --check --quiet <<<"$sha256  axe-core-$version.tgz" >&2; then
    say "the package is not the one that is pinned here"
    exit 1
fi
tar -xzf "axe-core-$version.tgz" package/axe.min.js
mkdir -p "$cache"
mv -f package/axe.min.js "$script.$$"
mv -f "$script.$$" "$script"
printf '%s\n' "$script"
