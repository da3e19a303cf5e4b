"""Rules of what sessions take from outside."""
