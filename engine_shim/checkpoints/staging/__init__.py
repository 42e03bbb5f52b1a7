"""Copies between a KV cache in device memory and host memory."""
