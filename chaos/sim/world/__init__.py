"""Time, network and connections of a simulated fleet."""
