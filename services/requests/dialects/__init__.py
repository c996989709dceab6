"""APIs: the bodies of each as requests, and answers as its events. OpenAI's chat is what all become."""
