"""Pictures, sound and mp4 files: everything between decoded tensors and files. No ComfyUI, no model code; PyAV, Pillow and soundfile are imported on first use.

| module | what |
| --- | --- |
| image | loads a picture, prepares it as the reference the VAE encodes |
| frames | resizes clips, converts between uint8 and ComfyUI's float IMAGE |
| mux | writes mp4 and wav files whole or not at all, exchanges a sound track |
| reading | measures and decodes an mp4 |
| metadata | what a finished clip says about how it was made |
| preview | small pictures straight from latents while sampling runs |
| files | the atomic write and the lazy imports the others use |
"""
