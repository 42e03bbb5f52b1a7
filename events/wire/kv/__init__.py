"""The KV protocol: engines, agents and state daemons about checkpoints of KV blocks."""
