"""I26: mechanisms that save time are seen at work, within their bounds.

Every answer may be right while each failure costs seconds more than it must. So what each mechanism
must show is asked of the log and of what is known of the faults, never of wall time. Each part names
its bound, and what it leaves out:

- `noticed_deaths`: an engine's death is known by its agent's notice, and no notice of another kind is
  believed.
- `used_restores`: streams whose blocks are held are restored.
- `new_holders`: a request whose holder died gets another.
- `fair_turns`: no tenant waits while others are served.

A run whose faults are not all known, a real one, has the last part and believed notices only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relume.chaos.validators.promises.service.fair_turns import starved_tenants
from relume.chaos.validators.promises.service.new_holders import missing_holders
from relume.chaos.validators.promises.service.noticed_deaths import believed_lies, late_deaths
from relume.chaos.validators.promises.service.used_restores import unused_restores
from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.chaos.validators.strikes import Strike
from relume.events.log.interface import RevisionGroup

PROMISE = "I26"


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    strikes: Sequence[Strike] | None = None,
    late_ms: Mapping[str, int] | None = None,
) -> list[Violation]:
    """Mechanisms that were not seen. `strikes`: all faults of the run; None: not all are known.
    `late_ms`: streams whose writer is late, and by how much at most."""
    log = log_of(groups)
    found = [*starved_tenants(log), *believed_lies(log)]
    if strikes is not None:
        found += missing_holders(log, strikes, late_ms or {})
        found += late_deaths(log, strikes, late_ms or {})
        found += (("restores", text) for text in unused_restores(log, strikes))
    return [Violation(PROMISE, about, text) for about, text in found]
