"""Export of batch spans as OpenTelemetry traces."""
