"""The view a replica decides on: the fold, its own events that the fold lacks, and its clock."""
