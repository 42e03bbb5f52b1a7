"""Scenarios on real processes: etcd, agents, state daemons, gateways and vLLM engines.

`live_fleet.run` takes a scenario and a seed and returns the `Outcome` that the simulator returns
too. Everything runs on this machine, on loopback, in temporary directories. Each run has a
log, agents, engines, daemons and replicas of its own. `processes.shared_fixture.Bed` has the parts
that start slowly and carry no state of a run: etcd, under another key prefix, and the zygote, from
which engines are forked. It serves one run after the other.
"""
