"""AnchorTP's published results, compared with ours."""
