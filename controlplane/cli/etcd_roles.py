"""`relume doctor --etcd-roles`: etcdctl commands that give each process its own user of etcd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote
from urllib.parse import urlencode

from relume.controlplane.cli.admin_client import EXIT_NO
from relume.controlplane.cli.output import print_error, print_lines
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.keys import BadStreamName, Keys
from relume.events.etcd.permissions import Grant, of_control_plane, of_reader, of_worker

CONTROL_PLANE = "relume-control"
READER = "relume-reader"
HEAD = """\
# Users of etcd for the log under {prefix}. Run this in a folder that only you can read, with
# etcdctl of etcd's version. If authentication is enabled already, set ETCDCTL_USER=root:PASSWORD.
# Each USER.url is what `--etcd @FILE` of its process reads. Passwords that exist here stay.
# Run it again with the names of new workers: etcdctl then says that the other users exist."""
FOOT = """\
# Defragmenting is reserved for root. Run `etcdctl defrag --cluster` yourself when a replica asks
# for it, or let the replicas do it, which makes them root of etcd:
#   etcdctl user grant-role {control_plane} root
# From here on etcd refuses everybody else. Stop replicas and agents before, start them after."""


def print_roles(etcd: EtcdConfig, workers: Sequence[str]) -> int:
    """Print the commands for these workers; exit 1 if a name is none."""
    try:
        lines = list(commands(etcd, [name.strip() for name in workers if name.strip()]))
    except BadStreamName as error:
        print_error(f"relume doctor: --etcd-roles: {error}")
        return EXIT_NO
    print_lines("\n".join(lines).split("\n"))
    return 0


def commands(etcd: EtcdConfig, workers: Sequence[str]) -> Iterator[str]:
    """Lines of a shell script. Raises BadStreamName."""
    keys = Keys(etcd.prefix)
    grants = {CONTROL_PLANE: of_control_plane(keys), READER: of_reader(keys)}
    grants |= {f"relume-worker-{name}": of_worker(keys, name) for name in workers}
    scheme = "http" if etcd.tls is None else "https"
    yield HEAD.format(prefix=quote(etcd.prefix))
    yield "export ETCDCTL_API=3"
    endpoints = ",".join(f"{scheme}://{endpoint}" for endpoint in etcd.endpoints)
    yield f"export ETCDCTL_ENDPOINTS={quote(endpoints)}"
    if etcd.tls is not None:
        for variable, path in (("CACERT", etcd.tls.ca), ("CERT", etcd.tls.cert)):
            if path:
                yield f"export ETCDCTL_{variable}={quote(path)}"
        if etcd.tls.key:
            yield f"export ETCDCTL_KEY={quote(etcd.tls.key)}"
    yield "umask 077"
    for user, granted in grants.items():
        yield ""
        yield from _user(user)
        yield f"etcdctl role add {user}"
        for grant in granted:
            yield f"etcdctl role grant-permission {user} {_permission(grant)}"
        yield f"etcdctl user grant-role {user} {user}"
        yield _url(etcd, scheme, user)
    yield ""
    yield FOOT.format(control_plane=CONTROL_PLANE)
    yield from _user("root")
    yield "etcdctl user grant-role root root"
    yield "etcdctl auth enable"


def _user(name: str) -> Iterator[str]:
    """A password of 192 bits in a file, and the user. No process list shows the password."""
    file = f"{name}.password"
    yield f"test -s {file} || head -c 24 /dev/urandom | base64 | tr '+/' '-_' > {file}"
    yield f"etcdctl user add {name} --interactive=false < {file}"


def _permission(grant: Grant) -> str:
    kind = "readwrite" if grant.write else "read"
    prefix = " --prefix=true" if grant.is_prefix else ""
    return f"{kind} {quote(grant.key.decode())}{prefix}"


def _url(etcd: EtcdConfig, scheme: str, user: str) -> str:
    options = ""
    if etcd.tls is not None:
        named = ((name, getattr(etcd.tls, name)) for name in etcd.tls.__struct_fields__)
        options = "?" + urlencode([(name, value) for name, value in named if value], safe="/")
    after = f"{','.join(etcd.endpoints)}{etcd.prefix}{options}"
    return (
        f"printf '%s%s%s\\n' {scheme}://{user}: \"$(cat {user}.password)\" "
        f"{quote('@' + after)} > {user}.url"
    )
