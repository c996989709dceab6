"""Images in prompts: what a model's processor makes of them, in tokens. Pixels are compute's."""
