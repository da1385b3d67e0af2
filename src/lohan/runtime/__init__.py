"""The engine room: a model driven block by block, its weights and activations coming and going."""
