"""The control plane: replica, gateway, stream machine, history, admin API, replay, telemetry, commands."""
