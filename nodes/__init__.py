"""The ComfyUI nodes: the only folder that imports ComfyUI."""
