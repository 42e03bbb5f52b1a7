"""What a request body says: classification, prompt rendering, token counts."""
