"""`diloco run`: start all processes of a run on this machine, with their display, output folder and report."""
