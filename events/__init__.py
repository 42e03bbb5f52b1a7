"""The vocabulary of the log, its codec and the interface of the log itself.

Nothing here reads a clock, a socket or a random number; `relume.events.etcd` is the one
subpackage with I/O and is closed to `policies`.
"""
