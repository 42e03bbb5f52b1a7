"""The log on etcd: the one part of `events` with I/O.

Start at `factory.EtcdLog`; the protocol is described in `writer` (appending, outages) and
`reader` (reading all, following).
"""
