#!/usr/bin/env bash
# Print the path of a program of Prometheus; everything else goes to stderr.
#
#   deploy/dev/get-prometheus.sh promtool      which tests the alert rules
#   deploy/dev/get-prometheus.sh prometheus    which evaluates the queries of the dashboards
#
# Looks at $RELUME_PROMTOOL or $RELUME_PROMETHEUS, then on PATH, else takes it out of the distribution's
# package `prometheus` (apt-get download; nothing is installed) into ~/.cache/relume/prometheus.
# Exit status: 0 found, 1 none found, 2 wrong usage.
set -euo pipefail

program=${1:-}
case $program in
promtool) given=${RELUME_PROMTOOL:-} variable=RELUME_PROMTOOL ;;
prometheus) given=${RELUME_PROMETHEUS:-} variable=RELUME_PROMETHEUS ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
say() { printf '%s: %s\n' "$program" "$*" >&2; }

cache=${XDG_CACHE_HOME:-$HOME/.cache}/relume/prometheus
for found in "$given" "$(type -p "$program" || true)" "$cache/$program"; do
    if [[ -n $found ]] && timeout 10 "$found" --version >/dev/null 2>&1; then
        printf '%s\n' "$found"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    say "none on PATH; install it, or set $variable=/path/to/$program"
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
if ! timeout 60 apt-get download -q prometheus >&2; then
    timeout 60 apt-get update -q >&2 || say "apt-get update failed"
    if ! timeout 60 apt-get download -q prometheus >&2; then
        say "the distribution has no package prometheus; set $variable=/path/to/$program"
        exit 1
    fi
fi
dpkg-deb -x prometheus_*.deb package
mkdir -p "$cache"
mv -f "package/usr/bin/$program" "$cache/$program.$$"
mv -f "$cache/$program.$$" "$cache/$program"
printf '%s\n' "$cache/$program"
