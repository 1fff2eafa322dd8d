"""Virtual GPUs: the source that needs none. `VirtualGpu` is one card as one rank of a world."""
