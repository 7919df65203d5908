"""The checks of `tokenmill doctor`: what a service needs, what is there, how to mend the rest."""
