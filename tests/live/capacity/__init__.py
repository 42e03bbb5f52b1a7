"""What clients notice while the fleet is short of workers."""
