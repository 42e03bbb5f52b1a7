"""Health of workers: evidence, judgement, breakers, the guard."""
