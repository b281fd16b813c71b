"""The expert network for Hopper's asynchronous tensor cores, in Gluon (part of Triton 3.6)."""
