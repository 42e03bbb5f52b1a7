"""Engine, worker and request life in the fold: a table each, and what its steps change."""
