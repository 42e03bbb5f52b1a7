"""HTTP on bare protocols: client connections, connections to engines, replies."""
