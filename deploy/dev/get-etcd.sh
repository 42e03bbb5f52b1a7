#!/usr/bin/env bash
# Print the path of an etcd that is fit to hold the log; everything else goes to stderr.
#
#   deploy/dev/get-etcd.sh [--no-install]
#
# Looks at $RELUME_ETCD, else every etcd on PATH, else installs the distribution's package (as root,
# with apt-get, without letting the packaged service start; etcdctl comes with it). Which versions are fit, and why others
# are not, is decided by events/etcd/client/etcd_versions.py.
# Exit status: 0 found, 3 refused (the reason is on stderr), 1 none found, 2 wrong arguments.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
install=yes

say() { printf '%s\n' "$*" >&2; }

usage() {
    say "usage: get-etcd.sh [--no-install]"
    exit 2
}

while (($#)); do
    case $1 in
        --no-install)
            install=no
            shift
            ;;
        *) usage ;;
    esac
done

# Judge a version text; the reason, if any, goes to stderr. Status as etcd_versions.py gives it.
judge() {
    local python=$checkout/.venv/bin/python
    [[ -x $python ]] || python=python3
    "$python" -I "$checkout/events/etcd/client/etcd_versions.py"
}

# 0: fit. 3: refused. 4: does not answer like etcd.
judge_binary() {
    local banner reason status=0
    if ! banner=$(timeout 10 "$1" --version </dev/null 2>/dev/null); then
        say "etcd: $1 does not run (\`$1 --version\` failed)"
        return 4
    fi
    reason=$(judge <<<"$banner" 2>&1) || status=$?
    if [[ -n $reason ]]; then say "etcd: $1: ${reason%%$'\n'*}"; fi
    return "$status"
}

accept() {
    printf '%s\n' "$1"
    exit 0
}

# The package's service would take ports 2379 and 2380 and keep data of its own. While a
# policy-rc.d answers 101, maintainer scripts start nothing; ours is removed afterwards.
install_package() {
    local policy=/usr/sbin/policy-rc.d ours=no status=0
    if [[ ! -e $policy ]]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        trap 'exit 130' INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        ours=yes
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        etcd-server etcd-client >&2 ||
        status=$?
    if [[ $ours == yes ]]; then
        rm -f "$policy"
        trap - EXIT INT TERM
    fi
    if ((status == 0)) && [[ -d /run/systemd/system ]]; then
        systemctl disable --now etcd >/dev/null 2>&1 || true # nor at the next boot
    fi
    return "$status"
}

candidate_version() {
    apt-cache policy etcd-server 2>/dev/null |
        sed -n 's/^ *Candidate: *\(.*:\)\{0,1\}\([0-9][0-9.]*\).*/\2/p'
}

advise() {
    say "etcd: none fit for use was found. Any of these helps:"
    say "  - Debian 12 or later: apt-get install etcd-server, and: systemctl disable --now etcd"
    say "  - take 3.6.14 or later, or 3.5.33 or later, from github.com/etcd-io/etcd/releases"
    say "    and put it on PATH, or set RELUME_ETCD=/path/to/etcd"
}

if [[ -n ${RELUME_ETCD:-} ]]; then
    if [[ ! -x $RELUME_ETCD ]]; then
        say "etcd: RELUME_ETCD=$RELUME_ETCD is not an executable file"
        exit 1
    fi
    status=0
    judge_binary "$RELUME_ETCD" || status=$?
    if ((status == 0)); then accept "$RELUME_ETCD"; fi
    say "etcd: RELUME_ETCD names it, so nothing else is tried; unset it to look on PATH"
    exit $((status == 3 ? 3 : 1))
fi

refused=no
while read -r binary; do
    status=0
    judge_binary "$binary" || status=$?
    if ((status == 0)); then accept "$binary"; fi
    if ((status == 3)); then refused=yes; fi
done < <(type -ap etcd | awk '!seen[$0]++')

give_up() {
    advise
    if [[ $refused == yes ]]; then exit 3; fi
    exit 1
}

if [[ $install == no ]] || ! command -v apt-get >/dev/null; then give_up; fi
if ((EUID != 0)); then
    say "etcd: installing the distribution's package needs root: sudo apt-get install etcd-server"
    give_up
fi
candidate=$(candidate_version)
if [[ -z $candidate ]]; then
    say "etcd: asking the distribution for its package (apt-get update)"
    apt-get update -q >&2 || say "etcd: apt-get update failed; going on with what is known"
    candidate=$(candidate_version)
fi
if [[ -z $candidate ]]; then
    say "etcd: the distribution has no package etcd-server"
    give_up
fi
if ! judge <<<"$candidate" 2>/dev/null; then
    say "etcd: the distribution's package is $candidate:"
    judge <<<"$candidate" || true
    refused=yes
    give_up
fi
say "etcd: installing the distribution's etcd-server $candidate (its service will not be started)"
if ! install_package; then
    say "etcd: apt-get install etcd-server failed (its output is above)"
    give_up
fi
hash -r
installed=$(type -p etcd || echo /usr/bin/etcd)
for binary in "$installed" /usr/bin/etcd; do
    if judge_binary "$binary"; then accept "$binary"; fi
done
give_up
