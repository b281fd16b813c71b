"""Schedule, solver, guidance, noise and the denoising loop. Imports the leaves only; knows a velocity protocol, not the model."""
