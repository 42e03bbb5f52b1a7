"""Names of the environment variables that Relume reads, and those that look like one and are none.

A misspelt variable would otherwise be ignored in silence. The names are listed here since neither the
control plane nor the agent imports the other's settings; a test compares them with the declarations.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

PREFIX = "RELUME_"
SETTINGS = frozenset(
    """
    ADMIN_HOST ADMIN_PORT ADMIN_TOKENS ADVERTISE_HOST ALLOWED_ORIGINS API_KEYS ARCHIVE_DIR
    BACKEND BACKEND_KEY_FILE BACKOFF_S CANARY_BUDGET_PPM CANARY_INTERVAL_S CANARY_LIMITS
    CHECKPOINT_ADVERTISE CHECKPOINT_ALLOW_UNLOCKED CHECKPOINT_COLD_AFTER_S CHECKPOINT_CURVE_FILE
    CHECKPOINT_FILE_DIR CHECKPOINT_FILE_MB CHECKPOINT_HOLDERS CHECKPOINT_LINKS CHECKPOINT_LISTEN
    CHECKPOINT_LOCAL CHECKPOINT_MB CHECKPOINT_PERCENT CHECKPOINT_PLACEMENT
    CHECKPOINT_PRIVATE_NETWORKS CHECKPOINT_RECOVERY CHECKPOINT_RESERVE_MB CHECKPOINT_SECRET_FILE
    CHECKPOINT_SOCKET CROSSCHECK_LIMITS DEGRADATION DEGRADATION_LIMITS DOMAIN DRAIN_ANNOUNCE_S
    DRAIN_S ENGINE_ARGS ENGINE_HOST ENGINE_NICE ENGINE_PORT ETCD_ENDPOINTS ETCD_LIMITS
    ETCD_QUOTA_BYTES GATEWAY_LIMITS HANG_RESTART_S HEALTH_LIMITS HOST HOST_KIND KEEP_WEIGHTS_MB
    LEASE_TTL_S LOG_FORMAT LOG_LEVEL MAX_BODY_BYTES MIGRATION_LIMITS MIGRATION_MOVES MODEL NAME
    NOTICE_PORT OVERDUE_LIMITS POLICY PORT PREFIX READY_TIMEOUT_S RESUME_GRACE_S RESUME_STREAMS
    RESUME_STREAM_KB RESUME_TOTAL_MB ROUTING_LIMITS ROUTING_SHED RUN_DIR SERVED_MODEL_NAME
    SNAPSHOTS_KEPT SNAPSHOT_EVERY_REVISIONS SNAPSHOT_EVERY_S SPARES SPOOL_DIR SPOOL_MB
    STABLE_AFTER_S STALL_CAP_MS STALL_FACTOR STALL_FLOOR_MS STATUS_PORT STOP_TIMEOUT_S TICK_MS
    TOKENIZER TOKENIZE_WAIT_MS TRACE_FILE UNKEPT_TENANTS WAITING_LIMITS WAIT_FOR_WORKER_S
    WEIGHTS_LOAD_MB_S WEIGHTS_READ_MB_S WORKER ZYGOTE
    """.split()
)
"""Settings of `relume serve` and `relume worker`, without the prefix."""
OTHERS = frozenset(
    """
    ADMIN ADMIN_TOKEN AGENT_SOCKET AXE CHAOS_WHEEL CHROMIUM CLOCK CONFIG ENGINE_PYTHON ETCD
    ETCDCTL FAILPOINTS INCARNATION LOAD_MB_S POOLS POOLS_ANEW PROGRESS PROMETHEUS PROMTOOL PYTHON
    STATE_SOCKET TORCH_INDEX WHEEL
    """.split()
)
"""Read by other commands, scripts and engines."""
_FOREIGN = re.compile(
    r"TEST_.*|(.*_)?SERVICE_(HOST|PORT)(_.*)?|(.*_)?PORT_\d+_(TCP|UDP)(_.*)?"
).fullmatch
_LINK = re.compile("(tcp|udp|sctp)://.*").fullmatch
"""Names of tests. Names and values of what Kubernetes says of services that begin with relume."""


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Names of `environ` that begin as ours do and that nothing reads, each with the name that was likely
    meant; empty if none is close."""
    known = SETTINGS | OTHERS
    found = {}
    for name, value in sorted(environ.items()):
        own = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or own in known:
            continue
        if not (_FOREIGN(own) or is_service_link(value)):
            close = difflib.get_close_matches(own, known, 1)
            found[name] = PREFIX + close[0] if close else ""
    return found


def is_service_link(value: str) -> bool:
    """Whether Kubernetes set it: of a service `relume` pods get RELUME_PORT, which is no setting then."""
    return _LINK(value) is not None


def remedy(close: str) -> str:
    """What to do about one of them."""
    return f"did you mean {close}?" if close else "nothing reads it; --help lists all variables"
