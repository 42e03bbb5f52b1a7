"""The blocks a state daemon holds, in shared memory and files."""
