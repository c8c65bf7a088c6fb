"""What the decoupled method is compared with, in the same code."""
