"""All tests in lanes beside each other: `python -m tests.lanes`."""
