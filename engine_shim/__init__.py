"""What runs on a worker's host: the agent, the code inside vLLM, the state daemon, the stand-in for plain servers."""
