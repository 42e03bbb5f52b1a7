"""Faults, traffic and judgement: the demo, the benches and the validators."""
