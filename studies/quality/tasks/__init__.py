"""What the lab trains: text, handwritten digits, folders of images."""
