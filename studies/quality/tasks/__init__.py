"""What the lab trains: text, functions and their arguments, images and their classes or their words."""
