"""AnchorTP's published results beside ours."""
