"""The demo model: the text it learned, the script that trains it, and its weights (in `model/`)."""
