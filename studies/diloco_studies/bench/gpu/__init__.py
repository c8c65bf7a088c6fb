"""`diloco bench gpu`: all that needs a GPU, in pieces that can be interrupted."""
