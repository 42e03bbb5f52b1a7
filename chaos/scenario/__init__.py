"""The scenario language: one description of a fleet, its traffic, its faults and its bounds.

`scenario_reader` turns YAML into the types of `language`, with the line and remedy of every error;
`schedule` expands it by a seed; `catalogue` lists all faults, phases and figures;
`library` the named scenarios.
"""
