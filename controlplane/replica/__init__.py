"""One control plane replica: read the log, step, run effects. Scheduler, leader, watchers."""
