#!/usr/bin/env bash
# Print the path of a promtool, which tests the alert rules; everything else goes to stderr.
#
#   deploy/dev/get-promtool.sh
#
# Looks at $RELUME_PROMTOOL, then on PATH, else takes it out of the distribution's package
# `prometheus` (apt-get download; nothing is installed) into ~/.cache/relume/promtool.
# Exit status: 0 found, 1 none found.
set -euo pipefail

say() { printf 'promtool: %s\n' "$*" >&2; }

for found in "${RELUME_PROMTOOL:-}" "$(type -p promtool || true)" \
    "${XDG_CACHE_HOME:-$HOME/.cache}/relume/promtool/promtool"; do
    if [[ -n $found ]] && timeout 10 "$found" --version >/dev/null 2>&1; then
        printf '%s\n' "$found"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    say "none on PATH; install Prometheus's promtool, or set RELUME_PROMTOOL=/path/to/promtool"
    exit 1
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/relume/promtool
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
if ! timeout 60 apt-get download -q prometheus >&2; then
    timeout 60 apt-get update -q >&2 || say "apt-get update failed"
    if ! timeout 60 apt-get download -q prometheus >&2; then
        say "the distribution has no package prometheus; set RELUME_PROMTOOL=/path/to/promtool"
        exit 1
    fi
fi
dpkg-deb -x prometheus_*.deb package
mkdir -p "$cache"
mv -f package/usr/bin/promtool "$cache/promtool.$$"
mv -f "$cache/promtool.$$" "$cache/promtool"
printf '%s\n' "$cache/promtool"
