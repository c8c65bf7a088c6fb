"""What the lab trains: text, keywords left out of it, images and their classes or their words."""
