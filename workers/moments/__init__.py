"""The inner optimizer's moments: saved, offered to others, taken over."""
