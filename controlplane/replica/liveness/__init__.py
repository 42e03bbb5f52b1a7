"""Watches over what runs, beside the stall watch of engines."""
