"""The fleet in virtual time: single-threaded, the same for the same seed.

`sim_fleet` is a whole run: `sim_clients` send, `sim_faults` strike when `event_watch` finds that they are due,
and a `sim_operator` commands. `worker_host` is a host: the real agent's code (`agent`, `daemon_keeper`) around a
simulated engine (`engine.worker_engine`, `engine_checkpoints`) and state daemon (`daemon`, on the real store).
`replica_process` is a replica: the real one with the simulated `gateway` in front. `etcd` is a cluster that dies
and elects, under the log's real code. `world` has time, network and connections; `message_ports` defines the
messages between processes. `engine` models a vLLM engine and its scheduler: `engine.fit` fits the time of a
step, `engine.compare` compares the model with a real run.
Nothing here uses the control plane's own predictions: the simulator serves to judge them.
"""
