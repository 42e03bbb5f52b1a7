"""What comes of taking a log's decisions again: counts, and where replay and record differ."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from relume.controlplane.replay.answers import Answer, answer_text


class Divergence(Struct, frozen=True, kw_only=True):
    """A place where replay and record differ. `what`: decision, prediction (of a first token),
    answer (of the leader), state, order, chain, record."""

    revision: int
    stream: str
    position: int
    what: str
    expected: str
    actual: str


class Verdict(Struct, kw_only=True):
    """The outcome.

    `contested` counts decisions that had at least two open candidates: a log without
    such decisions proves nothing about the policy. `stalls`, `holders`, `plans`, `migrations`
    are those of their kinds, `waits` the decisions of the admission queue. `answers` are the
    leader's. `skipped` decisions have a basis older than the snapshot that replay began with. Of
    the `hashes`, `foreign` ones are of a state shape that this build does not have (`shapes` counts
    them): only the order of events was compared there. `unanchored` events come after the last
    state hash. `untaken` counts the decisions that this build cannot repeat, by kind and version;
    they are in no other count. `unreadable` records were folded as such, as replicas of this build do.
    """

    decisions: int = 0
    contested: int = 0
    stalls: int = 0
    holders: int = 0
    plans: int = 0
    migrations: int = 0
    answers: int = 0
    skipped: int = 0
    hashes: int = 0
    foreign: int = 0
    unanchored: int = 0
    waits: int = 0
    events: int = 0
    changes: int = 0
    segments: int = 0
    revision: int = 0
    untaken: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No divergence, and something was really decided between alternatives."""
        return not self.divergences and self.contested > 0

    @property
    def complete(self) -> bool:
        """This build could take every decision again."""
        return not self.untaken

    def cannot_take(self, what: str) -> None:
        """Note a decision of a version that this build does not have."""
        self.untaken[what] = self.untaken.get(what, 0) + 1

    def changed(
        self, kind: str, about: str, event: Any, stream: str, position: int,
        recorded: Answer, actual: Answer, what: str = "decision",
    ) -> None:  # fmt: skip
        """A repeated decision differs from the recorded one: note the divergence."""
        place = event.basis.revision, stream, position
        self.differ(*place, what, answer_text(about, recorded), answer_text(about, actual))

    def differ(
        self, revision: int, stream: str, position: int, what: str, expected: Any, actual: Any
    ) -> None:
        """Note a divergence."""
        self.divergences.append(
            Divergence(
                revision=revision,
                stream=stream,
                position=position,
                what=what,
                expected=str(expected),
                actual=str(actual),
            )
        )
