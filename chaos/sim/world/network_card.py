"""A host's network card: arrival times of its transfers at other hosts."""

from __future__ import annotations


class Links:
    """A host's network card, which carries one transfer after the other each way. Times in s.
    `buffered`: a transfer that waits for its receiver does not delay the sender's other traffic.
    `fetched` transfers use connections of their own, which get half of a card that also carries
    blocks."""

    def __init__(self, bytes_s: float, buffered: bool = False) -> None:
        self.bytes_s = bytes_s
        self.buffered = buffered
        self.out = self.back = 0.0
        self.fetched_out = self.fetched_back = 0.0


def carried(sender: Links, receiver: Links, size: int, now: float, fetched: bool = False) -> float:
    """When `size` bytes sent now have left one host and reached the other, s."""
    if sender.buffered and sender is not receiver:
        if fetched:
            return _fetched(sender, receiver, size, now)
        begin = max(now, sender.out)
        sender.out = begin + size / sender.bytes_s
        receiver.back = max(begin, receiver.back) + size / receiver.bytes_s
        return max(sender.out, receiver.back)
    begin = max(now, sender.out, receiver.back)
    end = begin + size / min(sender.bytes_s, receiver.bytes_s)
    sender.out = receiver.back = end
    return end


def _fetched(sender: Links, receiver: Links, size: int, now: float) -> float:
    begin = max(now, sender.fetched_out)
    share = size / sender.bytes_s
    sender.fetched_out = begin + share * (2 if sender.out > begin else 1)
    sender.out += share if sender.out > begin else 0.0
    begin, share = max(begin, receiver.fetched_back), size / receiver.bytes_s
    receiver.fetched_back = begin + share * (2 if receiver.back > begin else 1)
    receiver.back += share if receiver.back > begin else 0.0
    return max(sender.fetched_out, receiver.fetched_back)
