"""What the lab trains: text, keywords left out of it, digits and their classes or their words."""
