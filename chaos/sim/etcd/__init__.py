"""etcd as a model: members, stored keys, the stubs of its client."""
