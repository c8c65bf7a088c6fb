"""What the lab trains: text, digits and their classes or their words."""
