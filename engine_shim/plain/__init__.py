"""A stand-in before an OpenAI-compatible server without the plugin."""
