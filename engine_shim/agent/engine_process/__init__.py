"""The engine as a process: found, started, watched, ended."""
