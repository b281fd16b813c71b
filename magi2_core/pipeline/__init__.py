"""The stages of a clip: `build` makes a Pipeline from a checkpoint, `stages` holds one plain function a stage. Imports nothing by itself."""
