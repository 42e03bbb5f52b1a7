"""Scenarios on real processes: etcd, agents, state daemons, gateways and vLLM engines.

`live_fleet.run` takes a scenario and a seed and returns the `Outcome` that the simulator returns
too. Everything runs on this machine, on loopback, in temporary directories. Each run has a
log, agents, engines, daemons and replicas of its own; what takes long to start and remembers
nothing of a run (etcd, under another key prefix, and the process that engines are forked
from) is a `processes.shared_fixture.Bed` and serves one run after the other.
"""
