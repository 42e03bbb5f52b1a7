"""Processes that run an engine: stock `vllm serve`, and forks of a zygote."""
