"""A running ComfyUI seen from outside: HTTP client, headless start, and saved workflows as the prompts it takes. Imports leaves only."""
