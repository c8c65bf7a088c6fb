"""What every process needs of its machine: cores, logs, output, an end in order."""
