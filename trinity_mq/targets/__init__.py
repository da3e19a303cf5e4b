"""A run as commands name it: its folder, its configuration and its broker."""
