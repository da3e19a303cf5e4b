"""How rewards become a gradient: advantage functions, losses and the registry that joins them."""
