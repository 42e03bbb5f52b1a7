"""How the suite runs: who shares the machine, which outcomes a test can have, and seeds."""
