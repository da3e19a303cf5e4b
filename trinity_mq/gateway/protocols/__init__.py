"""APIs that agents use, each a translation to and from chat completions, the API of the engines. No I/O."""
