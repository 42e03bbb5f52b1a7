"""Published results, computed here and shown beside the published figures."""
