"""Whether a worker may be trusted with requests: decided once, by the leader, for all replicas."""
