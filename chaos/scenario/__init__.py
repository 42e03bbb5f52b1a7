"""The scenario language: one description of a fleet, its traffic, its faults and what to expect.

`scenario_reader` turns YAML into the types of `language`, with the line and remedy of every error;
`schedule` expands it by a seed; `catalogue` holds the faults, phases and figures there are;
`library` the named scenarios.
"""
