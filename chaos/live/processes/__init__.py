"""The real processes of a run: etcd, engine forks, agents, and signals to them."""
