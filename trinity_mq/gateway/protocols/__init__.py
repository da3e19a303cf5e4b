"""APIs that agents speak, each as a translation to and from chat completions, which engines speak. No I/O."""
