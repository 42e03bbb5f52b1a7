"""The debugger of a log: `relume replay --debug`."""
