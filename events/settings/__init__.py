"""One way to declare, read, explain and document settings, for all programs.

`declared` and `recorded` are pure; `sources` reads flags, environment and files;
`flags` and `reference` make the help text and the documentation.
"""
