"""Settings. Each is declared once; its flag, variable, key of the file and documentation follow from that."""
