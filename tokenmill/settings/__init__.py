"""Settings, each declared once: flags, variables, keys of the file and the docs follow from it."""
