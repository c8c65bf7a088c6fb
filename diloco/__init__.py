"""The front door: the command line, the one-machine launcher, and what they print and draw."""
