"""The two transformers and what they are made of: plain modules that never ask their rank. See README.md."""
