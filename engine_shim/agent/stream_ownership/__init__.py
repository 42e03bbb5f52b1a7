"""How an agent owns its worker's stream: after a dead agent, and in the next log."""
