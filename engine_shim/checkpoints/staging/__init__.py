"""Copies between a KV cache, in device or host memory, and staging memory."""
