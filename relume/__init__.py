"""One import name for the five packages of this repository (links to the folders beside this one)."""
