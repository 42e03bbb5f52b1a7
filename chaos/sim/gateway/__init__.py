"""The gateway of a simulated control plane replica."""
