"""Which rank holds which part of a model when the tensor-parallel size changes."""
