"""Images that clients bring: read, checked in helper processes, and kept outside the streams."""
