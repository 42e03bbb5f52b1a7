"""The control plane: the loop read -> step -> run effects, gateway, admin, replay, CLI."""
