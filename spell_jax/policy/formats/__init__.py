"""File formats of policies: safetensors, GGUF, and tokenizer.json."""
