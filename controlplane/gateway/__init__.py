"""The OpenAI endpoint: the token path, on bare protocols and bytes."""
