"""The log as data: codec and upcasts, segments with their hash chain, the interfaces of reader and writer, errors."""
