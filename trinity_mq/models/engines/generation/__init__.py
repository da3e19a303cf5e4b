"""Generation as every engine sees it: requests, token streams, pauses, stop conditions, text."""
