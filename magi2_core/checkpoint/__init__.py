"""Checkpoints: which are there (`catalog`), what their files hold (`index`), which rows a rank reads (`slices`), loading (`load`, `components`),
checksums (`manifest`), what the doctor says (`report`) and random tiny ones for tests (`tiny`). Imports nothing by itself: the catalog
is used inside the ComfyUI process and must stay light."""
