"""Model files of workers: whether a quarantined one has those of its class."""
