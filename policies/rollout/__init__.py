"""A rolling restart: the engines of a model begin anew, one failure domain after the other."""
