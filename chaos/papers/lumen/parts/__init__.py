"""What the reproductions of LUMEN share."""
