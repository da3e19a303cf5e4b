"""The path from rewards to a gradient: advantage functions, losses and the registry that joins them."""
