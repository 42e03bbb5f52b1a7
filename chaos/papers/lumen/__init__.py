"""LUMEN's published results, compared with ours."""
