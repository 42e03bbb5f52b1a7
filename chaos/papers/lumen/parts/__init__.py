"""Common parts of the reproductions of LUMEN."""
