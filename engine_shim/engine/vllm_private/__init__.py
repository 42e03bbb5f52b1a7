"""Private parts of vLLM 0.32.x that the shim touches; nothing else touches them."""
