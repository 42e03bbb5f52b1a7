"""The state daemon: checkpoints of other hosts' requests, in this host's DRAM.

One process a host (`python -m relume.engine_shim.checkpoints.daemon --config FILE`), which outlives
engine and agent. `store` holds the blocks, over `arena` (shared memory) and `file_tier`;
`service` is the protocol; `local_server` and `remote_server` carry it over a Unix socket
with shared memory, and over ZeroMQ. What it holds it loses with its process: it never
reads anything back from disk, and a new life says so by a new boot name.
"""
