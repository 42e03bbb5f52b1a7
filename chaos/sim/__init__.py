"""The fleet in virtual time: single-threaded, the same for the same seed.

`engine` is a vLLM engine as its scheduler makes it behave, `kv` its KV blocks, `cost` what a
step takes (fitted by `fit`, held against a real run by `compare`), `clock` the order of events.
`loop` runs real code in virtual time, as processes; `network` joins them, `ports` and `doors`
say what they tell each other; `etcd` is a cluster that dies and elects, under the log's real code;
`plane` is a replica, the real one behind the simulated `gateway` and `transport`.
`worker` is a host with the real agent's code (`agent`, `keeper`) around a simulated engine
(`worker_engine`, `checkpoints`) and state daemon (`daemon`, on the real store); `hosts` says what
it has. `clients` send, `faults` strike when `watch` sees it is time, an `operator` commands,
`fleet` is a whole run.
Nothing here uses the control plane's own predictions: it is what they are judged by.
"""
