"""Scenarios and their faults, the simulator and live runs, validators, what-if, benches, papers, the demo."""
