"""`penstock chat`: a conversation in the terminal, with any server that speaks OpenAI's Chat Completions."""
