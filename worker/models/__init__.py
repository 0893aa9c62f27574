"""Models: where they come from and how a GGUF file becomes a folder that transformers loads."""
