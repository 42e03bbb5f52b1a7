"""Published results, computed here and compared with the published figures."""
