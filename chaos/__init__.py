"""Scenarios and their faults, the simulator and live runs, validators, benches, papers, the demo."""
