"""Process set-up: cores, logs, output, signals."""
