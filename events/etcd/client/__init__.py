"""The connection to etcd: calls with deadlines, watches, leases, which versions are fit."""
