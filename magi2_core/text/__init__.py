"""Text side of the pack: captions and their compact form, the optional prompt enhancement, the tokenizer and the encoder.

`caption`, `negative`, `enhance`, `schemas`, `instructions` and `markdown` need the standard library only and are used by
the nodes; `tokenize`, `weights` and `encoder` run in a worker and import transformers when they are called.
"""
