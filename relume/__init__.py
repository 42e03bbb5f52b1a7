"""The import name of this repository: links to the five folders beside this one."""
