"""`diloco run`: all processes of a run on this machine, their display, folder and report."""
