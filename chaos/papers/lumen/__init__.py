"""LUMEN's published results beside ours."""
