"""The judgement on recorded histories of calls to etcd."""
