"""From the text that a model wrote to reasoning, content and calls. Pure functions of the text, fed
as it comes: however it is cut, the same comes out."""
