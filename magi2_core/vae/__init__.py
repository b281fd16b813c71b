"""The two video decoders and the image encoder: `wan` (Wan2.2 VAE, encode and quality decode), `turbo` (distilled decoder), `blocks`."""
