"""Whether the log in etcd continues the one that was there before."""
