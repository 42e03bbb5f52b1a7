"""A model of etcd: members, stored keys, the stubs of its client."""
