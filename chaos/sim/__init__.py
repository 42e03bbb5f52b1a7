"""The fleet in virtual time: single-threaded, the same for the same seed.

`sim_fleet` is a whole run: `sim_clients` send, `sim_faults` strike when `event_watch` sees that it is time, and
a `sim_operator` commands. `worker_host` is a host: the real agent's code (`agent`, `daemon_keeper`) around a
simulated engine (`engine.worker_engine`, `engine_checkpoints`) and state daemon (`daemon`, on the real store).
`replica_process` is a replica: the real one, behind the simulated `gateway`. `etcd` is a cluster that dies and
elects, under the log's real code. `world` has time, network and connections; `message_ports` says what
processes send each other. `engine` is a vLLM engine as its scheduler makes it behave: what a step takes is
fitted by `engine.fit` and compared with a real run by `engine.compare`.
Nothing here uses the control plane's own predictions: the simulator is what they are judged by.
"""
