"""Named places of the product where a test may pause, delay, fail or end a process.

Absent unless the environment variable `RELUME_FAILPOINTS` names a Unix socket. Then each process
connects to that socket at its start and takes rules from it (docs/testing/failpoints.md).
"""
