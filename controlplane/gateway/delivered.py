"""What the gateway holds of a request's answer, so that any worker can go on with it."""

from __future__ import annotations

from array import array

from relume.controlplane.gateway.errors import FrameError


class Delivered:
    """Token ids, and what the engine noted beside those of an answer in one piece (which
    it is given back unread). `ids` are those of a request of one choice."""

    __slots__ = ("_notes", "_several", "ids")

    def __init__(self) -> None:
        self.ids = array("I")
        self._several: dict[int, array[int]] = {}
        self._notes: dict[int, bytearray] = {}

    @property
    def count(self) -> int:
        """Tokens, of all choices."""
        return len(self.ids) + sum(map(len, self._several.values()))

    def of(self, choice: int) -> array[int]:
        """The ids of one of several choices, to add to."""
        return self._several.setdefault(choice, array("I"))

    def expect(self, ids: array[int], start: int) -> None:
        """Raises FrameError unless token `start` is the next of a choice."""
        if start != len(ids):
            raise FrameError(f"token {start} came where {len(ids)} was due")

    def add(self, ids: array[int], new: list[int]) -> None:
        """Add to the ids of a choice. Raises FrameError, with nothing added, on one out of
        range."""
        try:
            ids.fromlist(new)
        except OverflowError:
            raise FrameError("a token id is out of range") from None

    def note(self, choice: int, payload: bytes) -> None:
        """Keep the engine's note of the tokens just added. It is no longer than a part of
        the answer, which will be held as well."""
        self._notes.setdefault(choice, bytearray()).extend(payload)

    def resumption(self) -> tuple[str, bytes]:
        """Counts for the header `x-relume-resume`, and the bytes behind the body."""
        several = self._several or {0: self.ids}
        choices = range(max(several) + 1)
        ids = [several.get(choice, array("I")) for choice in choices]
        notes = [self._notes.get(choice, b"") for choice in choices]
        counts = [
            f"{len(i)}:{len(note)}" if note else f"{len(i)}"
            for i, note in zip(ids, notes, strict=True)
        ]
        return ",".join(counts), b"".join([*(i.tobytes() for i in ids), *notes])
