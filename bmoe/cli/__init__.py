"""The bmoe command: parse, call, show."""
