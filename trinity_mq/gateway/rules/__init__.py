"""Rules for the input that sessions accept from outside."""
